/** The page: connects the server, the conversations, the chat, the settings and the machine view. */

import { onUnauthorized, ServerError } from "./api.js";
import { announce, Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { firstThatFits, mostTokens } from "./context_fit.js";
import { branch, isEmptyFailure, newConversation, optionChanged, setField, setOption } from "./conversation.js";
import { byId, composes, h, icon } from "./dom.js";
import { mayBeSent } from "./fit_dialog.js";
import { DraftMessage } from "./draft_message.js";
import { draftOf, tidyDrafts } from "./drafts.js";
import { CONTEXT, Generator } from "./generation.js";
import { askAgain, askForKey } from "./key_dialog.js";
import { Library } from "./library.js";
import { MachineView } from "./machine.js";
import { Models } from "./models.js";
import { notify } from "./notice.js";
import * as preferences from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { session } from "./storage.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const RETRY_MS = 1000;
const OPEN = "cpuserve.open"; // the conversation that a reload of this tab shows again
const SHORTENED = 0.6; // how full the context is when the oldest messages are left out
const NEW_DRAFT = "new"; // the key of the draft of a conversation that has no messages yet
const IDEAS = [
  "Explain why decoding on a CPU is bound by memory bandwidth.",
  "Write a Python function that merges two sorted lists.",
  "Derive the quadratic formula.",
  "Compare bf16, int8 and 4-bit weights in a table.",
];

const settings = preferences.loadSettings();
preferences.applyTheme(settings);

const models = new Models();
let conversation = createConversation();
/** @type {WeakMap<Conversation, DraftMessage>} */
const drafts = new WeakMap();
/** @type {import("./attached_files.js").Reader} */
const reader = {
  readsPictures: () => models.readsPictures(modelOf(conversation)),
  measure: (part) => models.measure(modelOf(conversation), part),
  announce,
  complain: (texts) => notify(texts),
};

/** @type {Generator} */
const generator = new Generator({
  model: settleModel,
  fields: (one) => preferences.requestFields(settings, one.options),
  ownTools: () => preferences.ownTools(settings),
  keep: (one) => library.keep(one),
  leave: (one) => library.leave(one),
  added: (one) => chat.isShown(one) && chat.draw(),
  grew: (one, message) => chat.isShown(one) && chat.updateSoon(message),
  ended,
});
/** @type {Library} */
const library = new Library({
  listed: () => sidebar.draw(),
  merged: (one) => {
    if (!chat.isShown(one)) return;
    chat.draw();
    drawSettings();
  },
  removed: (one) => {
    generator.stop(one);
    if (chat.isShown(one)) select(createConversation());
  },
  streams: (id) => generator.streams(id),
  stop: (id) => generator.streams(id) && stopMessage(id),
  complain: (text) => say(text),
});
const chat = new Chat(generator, {
  changed: (one) => library.keep(one),
  reader,
  ownTools: () => preferences.ownTools(settings),
  mayBeSent: (parent, text, attached) => fits(conversation, parent, text, attached),
  isFull,
  shorten,
  sendAll: () => leaveOut(conversation, ""),
  stopElsewhere: (message) => library.stopElsewhere(message),
  shown: drawState,
});
const composer = new Composer(
  {
    send,
    stop: () => chat.stop(),
    readsPictures: () => models.readsPictures(modelOf(conversation)),
    complain: (texts) => notify(texts),
  },
  draftFor(conversation),
);
const sidebar = new Sidebar(library, {
  select,
  create,
  running: (one) => generator.run(one) !== undefined,
  rename: (one, title) => keepField(one, "title", title),
  pin: (one, pinned) => keepField(one, "pinned", pinned),
  remove,
});
const machine = new MachineView(byId("machine"));

function createConversation() {
  return newConversation(settings.system, preferences.firstOptions(settings));
}

/** @param {Conversation} one */
function modelOf(one) {
  return models.first(one.options.model, settings.model);
}

/**
 * Returns the model of a conversation, which stays with it when the user chooses another one elsewhere.
 * @param {Conversation} one
 */
function settleModel(one) {
  const model = modelOf(one);
  if (!one.options.model && model) setOption(one, "model", model);
  return model;
}

/** @param {Conversation} one */
function draftKey(one) {
  return Object.keys(one.messages).length ? one.id : NEW_DRAFT;
}

/**
 * @template {"title" | "pinned" | "system"} Name
 * @param {Conversation} one
 * @param {Name} name
 * @param {Conversation[Name]} value
 */
function keepField(one, name, value) {
  setField(one, name, value);
  library.keep(one);
}

/**
 * @param {Conversation} one
 * @param {string} name
 * @param {string} value
 */
function keepOption(one, name, value) {
  setOption(one, name, value);
  library.keep(one);
}

/**
 * @param {Conversation} one
 * @param {boolean} [empty] whether its draft is being sent
 */
function draftFor(one, empty = false) {
  const page = { key: () => draftKey(one), focus: () => composer.input.focus() };
  const draft = drafts.get(one) ?? new DraftMessage(reader, page, null, empty);
  drafts.set(one, draft);
  return draft;
}

/**
 * Returns what limits a prompt of a conversation.
 * @param {Conversation} one
 * @returns {import("./context_fit.js").Limits}
 */
function limitsOf(one) {
  const model = modelOf(one);
  const card = models.card(model);
  // Counting would load a model that is not loaded.
  const length = card?.architecture ? (card.context_length ?? 0) : 0;
  return { model, length, tools: preferences.toolFields(settings) };
}

/**
 * @param {Conversation} one
 * @param {string} from the first message that is sent; "" = all are
 */
function leaveOut(one, from) {
  keepOption(one, "from", from);
  if (chat.isShown(one)) chat.draw();
}

/** Leaves out the oldest messages of a full context, so that a part of it is free. */
async function shorten() {
  const one = conversation;
  const limits = limitsOf(one);
  const wishes = [Math.floor(SHORTENED * limits.length), mostTokens(limits.length)];
  // A question that failed is to be sent again.
  const last = branch(one).at(-1);
  const asked = last && isEmptyFailure(last) ? { ...one, head: last.parent } : one;
  const first = (await firstThatFits(asked, limits, wishes[0])) ?? (await firstThatFits(asked, limits, wishes[1]));
  if (first) leaveOut(one, first.id);
  else notify("The last turn alone fills the context: begin a new conversation.");
}

/**
 * Whether a response or its prompt has filled the context, and nothing was left out since.
 * @param {import("./conversation.js").Message} message
 */
function isFull(message) {
  if (optionChanged(conversation, "from") > message.changed) return false;
  const length = models.card(message.model ?? "")?.context_length ?? Infinity;
  return message.finish === CONTEXT || (message.finish === "length" && (message.figures?.context ?? 0) >= length - 1);
}

/**
 * @param {Conversation} one
 * @param {string | null} parent
 * @param {string} text
 * @param {import("./attachments.js").Attached} attached
 */
function fits(one, parent, text, attached) {
  return mayBeSent(one, parent, text, attached, limitsOf(one), (from) => leaveOut(one, from));
}

/** @param {DraftMessage} draft */
async function send(draft) {
  const one = conversation;
  const text = draft.text.trim();
  const { lists } = draft.files;
  if (!(await fits(one, one.head, text, lists))) return;
  if (draft.sent || one !== conversation) return;
  drafts.delete(one);
  draft.send(() => chat.send(one.head, text, lists));
  composer.show(draftFor(one, true));
  composer.input.focus();
}

/** @param {Conversation} chosen */
function select(chosen) {
  composer.draft.keep();
  composer.show(draftFor(chosen));
  conversation = chosen;
  session.set(OPEN, chosen.id);
  chat.show(chosen);
  sidebar.select(chosen);
  drawSettings();
  openPanel("sidebar", "menu", false);
  composer.input.focus();
}

/** Begins a conversation, unless the shown one is empty. */
function create() {
  select(Object.keys(conversation.messages).length ? createConversation() : conversation);
}

/** @param {Conversation} one */
async function remove(one) {
  generator.stop(one);
  const wasShown = chat.isShown(one);
  await library.remove(one);
  if (wasShown) select(createConversation());
  const act = async () => {
    await library.keep(one);
    if (wasShown) select(one);
  };
  notify(`"${one.title}" is deleted.`, { label: "Undo", act });
}

/** @param {string} id of a message */
function stopMessage(id) {
  const one = [...library.all.values()].find((each) => generator.run(each)?.message.id === id);
  if (one) generator.stop(one);
}

/**
 * @param {Conversation} one
 * @param {import("./conversation.js").Message} message
 * @param {unknown} error
 */
function ended(one, message, error) {
  const done = message.state === "done";
  if (chat.isShown(one)) {
    chat.update(message);
    drawState();
    if (done) announce("The response is complete.");
  } else {
    sidebar.unread.add(one.id);
    if (done) announce(`The response in "${one.title}" is complete.`);
  }
  sidebar.draw();
  // The model may be gone, or the server may have restarted with others.
  if (error instanceof ServerError) loadModels().catch(() => {});
}

/** Shows what the composer and the header say about the conversation: its model, and how full its context is. */
function drawState() {
  const model = modelOf(conversation);
  composer.setRunning(chat.running);
  composer.setPictures(models.readsPictures(model));
  const select = /** @type {HTMLSelectElement} */ (byId("model"));
  if (select.value !== model) select.value = model;
  const figures = branch(conversation).findLast((message) => message.figures)?.figures;
  const length = models.card(model)?.context_length ?? 0;
  const used = figures ? (figures.context ?? figures.prompt + figures.tokens) : 0;
  byId("context").hidden = !used || !length;
  if (!used || !length) return;
  const share = Math.min(1, used / length);
  /** @type {HTMLMeterElement} */ (byId("context-meter")).value = share;
  const full = share > 0.9 ? ": begin a new conversation soon" : "";
  const numbers = `${used.toLocaleString("en")} of ${length.toLocaleString("en")} tokens`;
  byId("context-text").textContent = `Context ${Math.round(100 * share)} % full, ${numbers}${full}`;
  byId("context").classList.toggle("full", share > 0.9);
}

function drawSettings() {
  const one = conversation;
  const form = byId("settings-form");
  // What the user writes there now is not drawn over; focusout draws it.
  if (form.dataset.of === one.id && form.contains(document.activeElement)) return;
  form.dataset.of = one.id;
  preferences.showSettings(settings, {
    system: one.system,
    setSystem: (text) => {
      settings.system = text;
      preferences.saveSettings(settings, "system");
      keepField(one, "system", text);
    },
    options: one.options,
    setOption: (name, value) => keepOption(one, name, value),
  });
}

/**
 * Shows a line of text above the page; an empty text hides the line.
 * @param {string} text
 * @param {HTMLElement} [button]
 */
function say(text, button) {
  const line = byId("status");
  line.replaceChildren(text, " ", button ?? "");
  line.hidden = !text;
}

/** Lists the models, and waits for the server while it starts. */
async function connect() {
  let waited = false;
  for (;;) {
    try {
      await loadModels();
      const health = await fetch("health");
      if (health.ok) break;
      const body = await health.json();
      say(body.error?.message ?? body.message ?? body.reason ?? "The model is loading.");
    } catch (error) {
      if (error instanceof ServerError && error.status === 401) return sayKeyIsMissing();
      say(error instanceof ServerError ? error.message : String(error));
    }
    waited = true;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  // A line that says something else stays.
  if (waited) say("");
}

function sayKeyIsMissing() {
  const onclick = () => {
    say("");
    askAgain();
    connect();
  };
  say("This server needs an API key.", h("button", { type: "button", onclick }, "Enter the key"));
}

/** Shows the models that the server has now; one that is gone does not stay selected. */
async function loadModels() {
  const before = modelOf(conversation);
  await models.load();
  const options = models.cards.map(({ id, parent }) =>
    h("option", { value: id }, parent ? `${id} (adapter of ${parent})` : id),
  );
  byId("model").replaceChildren(...options);
  drawState();
  const model = modelOf(conversation);
  if (before && before !== model) notify(`The server has no model ${before} now. ${model} is selected.`);
}

/**
 * Shows or hides the sidebar or the settings.
 * @param {"sidebar" | "settings"} id
 * @param {string} button
 * @param {boolean} [open]
 */
function openPanel(id, button, open) {
  const panel = byId(id);
  const inside = panel.contains(document.activeElement);
  const shown = panel.classList.toggle("open", open);
  if (id === "settings") panel.hidden = !shown;
  // On a phone one of them covers the page.
  if (shown && id === "settings") byId("sidebar").classList.remove("open");
  byId(button).setAttribute("aria-expanded", String(shown));
  // After opening a panel, Tab moves into it; after closing it, the focus must not stay inside.
  if (shown) panel.focus();
  else if (inside) byId(button).focus();
}

function showView() {
  const isMachine = location.hash === "#machine";
  byId("chat").hidden = isMachine;
  byId("machine").hidden = !isMachine;
  byId("tab-chat").toggleAttribute("aria-current", false);
  byId("tab-machine").toggleAttribute("aria-current", false);
  byId(isMachine ? "tab-machine" : "tab-chat").setAttribute("aria-current", "page");
  machine.show(isMachine);
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (document.querySelector("dialog[open]") || composes(event)) return;
  if (event.key === "Escape") {
    if (chat.running) chat.stop();
    else {
      openPanel("settings", "open-settings", false);
      openPanel("sidebar", "menu", false);
    }
  }
  const command = event.ctrlKey || event.metaKey;
  if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    create();
  }
  if (command && !event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    openPanel("sidebar", "menu", true);
    sidebar.search.focus();
  }
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(/** @type {HTMLElement} */ (event.target).tagName);
  if (event.key === "/" && !typing && !command) {
    event.preventDefault();
    composer.input.focus();
  }
}

/**
 * Takes files that are dropped anywhere on the page: the browser would leave the page and open them.
 * @param {DragEvent} event
 */
function onDrag(event) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  const taken = event.defaultPrevented; // by the form of an edit
  event.preventDefault();
  document.body.classList.toggle("dropping", event.type === "dragover");
  if (event.type !== "drop" || taken) return;
  if (location.hash === "#machine") location.hash = "#chat";
  composer.draft.files.add([...event.dataTransfer.files]);
}

/** Keeps what streams, as stopped: the responses end with the page. */
function onLeave() {
  for (const one of library.all.values()) generator.stop(one);
  library.leaveUnsaved();
}

/**
 * Loads the stored conversations, and shows the one that this tab showed before the page was loaded again.
 * @param {string | null} id
 */
async function loadConversations(id) {
  await library.load();
  const before = library.all.get(id ?? "");
  const begun = Object.keys(conversation.messages).length || composer.input.value !== (draftOf(NEW_DRAFT)?.text ?? "");
  if (before && !begun) select(before);
  if (!library.stores) return;
  const all = Array.from(library.all.values());
  const messages = new Set(all.flatMap((one) => Object.keys(one.messages)));
  tidyDrafts((key) => key === NEW_DRAFT || key.startsWith("setting ") || library.all.has(key) || messages.has(key.replace(/^edit /, "")));
}

byId("menu").append(icon("menu"));
byId("menu").addEventListener("click", () => openPanel("sidebar", "menu"));
byId("open-settings").append(icon("sliders"));
byId("open-settings").addEventListener("click", () => openPanel("settings", "open-settings"));
byId("veil").addEventListener("click", () => {
  openPanel("settings", "open-settings", false);
  openPanel("sidebar", "menu", false);
});
byId("newest").prepend(icon("down"));
byId("newest").addEventListener("click", () => chat.toEnd());
byId("model").addEventListener("change", (event) => {
  settings.model = /** @type {HTMLSelectElement} */ (event.target).value;
  preferences.saveSettings(settings, "model");
  keepOption(conversation, "model", settings.model);
  drawState();
});
byId("ideas").append(
  ...IDEAS.map((text) => h("button", { type: "button", onclick: () => composer.setText(text) }, text)),
);
document.addEventListener("keydown", onKey);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && models.cards.length) loadModels().catch(() => {});
  // A phone may end a hidden page without a further event.
  if (document.hidden) library.leaveUnsaved();
});
window.addEventListener("beforeunload", () => (generator.closing = performance.now()));
window.addEventListener("pagehide", onLeave);
window.addEventListener("hashchange", showView);
for (const name of /** @type {const} */ (["dragover", "drop"])) document.addEventListener(name, onDrag);
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
onUnauthorized(askForKey);
preferences.followSettings(settings, drawSettings);
byId("settings-form").addEventListener("focusout", (event) => {
  if (!byId("settings-form").contains(/** @type {Node | null} */ (event.relatedTarget))) setTimeout(drawSettings);
});

const before = session.get(OPEN);
select(conversation);
showView();
loadConversations(before);
connect();
