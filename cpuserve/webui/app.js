/** The page: connects the server, the conversations, the chat, the settings and the machine view. */

import { apiKey, json, onUnauthorized, ServerError, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { newConversation } from "./conversation.js";
import { byId, h, icon } from "./dom.js";
import { MachineView } from "./machine.js";
import { applyTheme, loadSettings, saveSettings, showSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const RETRY_MS = 1000;
const IDEAS = [
  "Explain why decoding on a CPU is bound by memory bandwidth.",
  "Write a Python function that merges two sorted lists.",
  "Derive the quadratic formula.",
  "Compare bf16, int8 and 4-bit weights in a table.",
];

const settings = loadSettings();
applyTheme(settings);

let conversation = newConversation(settings.system);

const chat = new Chat(settings, { changed: keep, running: (running) => composer.setRunning(running) });
const composer = new Composer({
  send: (text, images, files) => chat.send(text, images, files),
  stop: () => chat.stop(),
  complain: (text) => say(text),
});
const sidebar = new Sidebar({ select, create: () => select(newConversation(settings.system)) });
const machine = new MachineView(byId("machine"));

/** @param {Conversation} changed */
async function keep(changed) {
  // Do not store a conversation without messages.
  if (!Object.keys(changed.messages).length && !sidebar.all.includes(changed)) return;
  try {
    await sidebar.keep(changed);
  } catch (error) {
    say(`The conversation could not be saved in this browser: ${error}`);
  }
}

/** @param {Conversation} chosen */
function select(chosen) {
  conversation = chosen;
  chat.show(chosen);
  sidebar.select(chosen);
  drawSettings();
  openPanel("sidebar", "menu", false);
  composer.input.focus();
}

function drawSettings() {
  showSettings(settings, {
    system: () => conversation.system,
    setSystem: (text) => {
      conversation.system = text;
      settings.system = text;
      saveSettings(settings);
      keep(conversation);
    },
    changed: () => {},
  });
}

/**
 * Shows a line of text above the page; an empty text hides the line.
 * @param {string} text
 */
function say(text) {
  const line = byId("status");
  line.textContent = text;
  line.hidden = !text;
}

/** Asks the user for the API key; the promise resolves when the user has entered a key. */
function askForKey() {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  byId("key-wrong").hidden = !apiKey();
  if (!dialog.open) dialog.showModal();
  return /** @type {Promise<void>} */ (
    new Promise((resolve) => {
      dialog.addEventListener(
        "close",
        () => {
          const key = /** @type {HTMLInputElement} */ (byId("key")).value.trim();
          setApiKey(key, /** @type {HTMLInputElement} */ (byId("key-remember")).checked);
          resolve();
        },
        { once: true },
      );
    })
  );
}

/** Lists the models, and waits for the server while it starts. */
async function connect() {
  for (;;) {
    try {
      const { data } = await json("v1/models");
      showModels(data);
      const health = await fetch("health");
      if (health.ok) break;
      const body = await health.json();
      say(body.error?.message ?? body.message ?? body.reason ?? "The model is loading.");
    } catch (error) {
      say(error instanceof ServerError ? error.message : String(error));
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  say("");
}

/** @param {{id: string, parent: string | null}[]} models */
function showModels(models) {
  const select = /** @type {HTMLSelectElement} */ (byId("model"));
  const names = models.map((model) => model.id);
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  const options = models.map(({ id, parent }) =>
    h("option", { value: id, selected: id === settings.model }, parent ? `${id} (adapter of ${parent})` : id),
  );
  select.replaceChildren(...options);
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
    select(newConversation(settings.system));
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

byId("menu").append(icon("menu"));
byId("menu").addEventListener("click", () => openPanel("sidebar", "menu"));
byId("open-settings").append(icon("sliders"));
byId("open-settings").addEventListener("click", () => openPanel("settings", "open-settings"));
byId("model").addEventListener("change", (event) => {
  settings.model = /** @type {HTMLSelectElement} */ (event.target).value;
  saveSettings(settings);
});
byId("ideas").append(
  ...IDEAS.map((text) => h("button", { type: "button", onclick: () => composer.setText(text) }, text)),
);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", showView);
onUnauthorized(askForKey);

select(conversation);
showView();
sidebar.load().catch((error) => say(`This browser keeps no conversations: ${error}`));
connect();
