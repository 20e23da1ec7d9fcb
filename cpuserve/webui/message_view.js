/** The DOM of one message: text, thoughts, pictures, tool calls, timing figures and buttons. */

import { picture } from "./attached_files.js";
import { documentText, pictureText } from "./attachments.js";
import { isEmptyFailure } from "./conversation.js";
import { copyText } from "./copy.js";
import { h, icon, iconButton } from "./dom.js";
import { draftOf } from "./drafts.js";
import { EditForm, editKey } from "./edit_form.js";
import { showMarkdown } from "./markdown.js";

/**
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./generation.js").Progress} Progress
 */

/**
 * The functions that the buttons of a message call. Edits return whether they are stored.
 * @typedef {object} Actions
 * @property {import("./attached_files.js").Reader} reader of the files of an edit
 * @property {(message: Message, text: string, attached: import("./attachments.js").Attached) => Promise<boolean>} edit
 * @property {(message: Message, text: string, attached: import("./attachments.js").Attached) => Promise<boolean>
 *   } mayBeSent whether an edit fits into the context, or the user sends it anyway
 * @property {(message: Message, text: string, more: boolean) => Promise<boolean>} editReply
 * @property {(message: Message) => void} retry
 * @property {(message: Message) => void} resume
 * @property {(message: Message) => void} remove
 * @property {(message: Message) => boolean} isFull whether its response, or its prompt, has filled the context
 * @property {() => void} shorten leaves out the oldest messages
 * @property {() => void} sendAll leaves out none
 * @property {(message: Message) => void} select
 * @property {(message: Message, callId: string, result: string) => void} result
 */

const ROLES = { user: "You", assistant: "Model", tool: "Tool" };

export class MessageView {
  /**
   * Makes the element of a message with its text only; `draw` adds everything else. So a long
   * conversation is shown at once, and most of it is drawn when it comes near the screen.
   * @param {Message} message
   * @param {Actions} actions
   */
  constructor(message, actions) {
    this.message = message;
    /** @type {Message[]} the branches at this place, with the message */
    this.siblings = [message];
    this.actions = actions;
    this.drawn = false;
    this.stamp = 0;
    this.shownCalls = "[[],[]]";
    this.shownTrouble = "";
    this.shownFoot = "";
    /** @type {Map<string, HTMLElement>} the forms for results, by call */
    this.forms = new Map();
    /** @type {HTMLElement | null} says that earlier messages are left out */
    this.line = null;
    /** @type {EditForm | null} */
    this.form = null;
    /** Whether there is an edit that is not sent, and not shown. */
    this.unsent = false;
    const { role } = message;
    const name = role === "assistant" ? (message.model ?? ROLES.assistant) : ROLES[role];
    // A long text scrolls, for which a keyboard needs the focus.
    const scrolls = role !== "assistant" && (message.text.length > 400 || message.text.split("\n").length > 8);
    this.text = h("div", { class: "prose", tabindex: scrolls ? "0" : null }, message.text);
    this.element = h(
      "article",
      { class: `message ${role} far`, id: `m-${message.id}`, "aria-label": name, tabindex: "-1" },
      h("header", {}, role === "tool" ? this.toolTitle() : h("bdi", {}, name), timeOf(message.created)),
      this.text,
    );
  }

  /**
   * @param {Message[]} siblings
   * @param {boolean} first whether the messages before it are not sent
   */
  place(siblings, first) {
    if (first !== (this.line !== null)) {
      this.line?.remove();
      const again = h("button", { type: "button", onclick: () => this.actions.sendAll() }, "Send them again");
      this.line = first ? h("p", { class: "left-out" }, "The messages before this one are not sent. ", again) : null;
      if (this.line) this.element.prepend(this.line);
    }
    const same = siblings.length === this.siblings.length && siblings.every((one, i) => one === this.siblings[i]);
    this.siblings = siblings;
    if (this.drawn && (!same || this.stamp !== this.message.changed)) this.update();
  }

  /** Draws the whole message, once. */
  draw() {
    if (this.drawn) return;
    this.drawn = true;
    this.thoughtText = h("div", { class: "prose" });
    this.thought = /** @type {HTMLDetailsElement} */ (
      h("details", { class: "thought" }, h("summary", {}, "Thoughts"), this.thoughtText)
    );
    this.calls = h("div", { class: "calls" });
    this.progress = h("div", { class: "progress", hidden: true });
    this.trouble = h("div");
    this.foot = h("footer", {});
    this.text.replaceChildren();
    this.text.before(...this.attachments(), this.thought);
    this.text.after(this.calls, this.progress, this.trouble, this.foot);
    this.element.classList.remove("far");
    const kept = draftOf(editKey(this.message));
    this.unsent = kept !== null && !kept.open;
    this.update();
    if (kept?.open) this.startEdit(false);
  }

  toolTitle() {
    return h("span", {}, icon("tool"), ` ${this.message.name ?? "tool"} returned`);
  }

  attachments() {
    const { images, seen = [], documents = [], files } = this.message;
    const pictures = images.map((src, i) => {
      const text = pictureText(seen[i]);
      return h("figure", {}, picture(src, i, "Attached picture"), text && h("figcaption", {}, text));
    });
    const links = documents.map((each) =>
      h(
        "a",
        { class: "file document", href: each.url, download: each.name },
        h("span", {}, each.name),
        h("small", {}, documentText(each)),
      ),
    );
    const texts = files.map((file) =>
      h("details", { class: "file" }, h("summary", {}, file.name), h("pre", { tabindex: "0" }, file.text)),
    );
    const all = [...pictures, ...links, ...texts];
    return all.length ? [h("div", { class: "attachments" }, ...all)] : [];
  }

  /**
   * Updates the page to the current state of the message.
   * @param {Set<string>} [open] the calls that wait for a result of the user
   * @param {Progress | null} [progress] how much of the prompt the server has computed
   */
  update(open = new Set(), progress = null) {
    const { message, thought, thoughtText } = this;
    if (!this.drawn || !thought || !thoughtText) return;
    this.stamp = message.changed;
    const running = message.state === "streaming";
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    thought.hidden = !message.thought;
    if (message.thought) {
      const thinking = running && !message.text && !message.calls.length;
      thought.classList.toggle("thinking", thinking);
      thought.firstElementChild?.replaceChildren(thinking ? "Thinking…" : "Thoughts");
      showMarkdown(thoughtText, message.thought);
    }
    if (message.role === "assistant") showMarkdown(this.text, message.text);
    else this.text.replaceChildren(h("p", { class: "plain", dir: "auto" }, message.text));
    if (!this.form) this.text.hidden = !message.text;
    this.showCalls(open);
    this.showProgress(running ? progress : null);
    this.showTrouble();
    this.showFoot(running);
  }

  /** @param {Progress | null} progress */
  showProgress(progress) {
    const place = /** @type {HTMLElement} */ (this.progress);
    place.hidden = !progress || progress.processed >= progress.total;
    if (!progress || place.hidden) return;
    const { total, processed } = progress;
    const text = `Reading the prompt: ${count(processed)} of ${count(total)} tokens${rest(progress)}`;
    if (!place.firstChild) place.append(h("progress", { "aria-label": "Prompt" }), h("span", {}));
    const bar = /** @type {HTMLProgressElement} */ (place.firstChild);
    bar.max = total;
    bar.value = processed;
    place.lastElementChild?.replaceChildren(text);
  }

  /** @param {Set<string>} open */
  showCalls(open) {
    const place = /** @type {HTMLElement} */ (this.calls);
    // Keep the form while the user writes in it: rebuild it only if the calls have changed.
    const state = JSON.stringify([this.message.calls, [...open]]);
    if (this.shownCalls === state) return;
    this.shownCalls = state;
    const shown = this.message.calls.map((call) => {
      const given = h("pre", { tabindex: "0", dir: "ltr" }, pretty(call.function.arguments));
      const title = h("summary", {}, icon("tool"), ` ${call.function.name}`);
      return h(
        "details",
        { class: "call", open: open.has(call.id) },
        title,
        given,
        open.has(call.id) && this.resultForm(call.id),
      );
    });
    place.replaceChildren(...shown);
  }

  /** @param {string} id */
  resultForm(id) {
    const known = this.forms.get(id);
    if (known) return known;
    const text = /** @type {HTMLTextAreaElement} */ (
      h("textarea", { rows: 3, "aria-label": "Result of the call", placeholder: "Result of the call" })
    );
    const send = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.actions.result(this.message, id, text.value);
    };
    const form = h("form", { class: "result", onsubmit: send }, text, h("button", { class: "primary" }, "Return"));
    this.forms.set(id, form);
    return form;
  }

  showTrouble() {
    const { message, actions, trouble } = this;
    const full = actions.isFull(message);
    const text = troubleOf(message, full);
    const failed = message.state === "failed";
    // The buttons stay while nothing changes: one of them may have the focus.
    const state = JSON.stringify([text, failed, !message.text, this.unsent, full]);
    if (this.shownTrouble === state) return;
    this.shownTrouble = state;
    trouble?.replaceChildren();
    if (this.unsent) {
      const edit = h("button", { type: "button", onclick: () => this.startEdit() }, "Continue editing");
      trouble?.append(h("div", { class: "trouble" }, h("p", { class: "note" }, "An edit is not sent."), edit));
    }
    if (!text) return;
    const resume = h("button", { type: "button", onclick: () => actions.resume(message) }, "Continue");
    const retry = h("button", { type: "button", onclick: () => actions.retry(message) }, "Retry");
    const note = h("p", { class: failed ? "wrong" : "note", role: failed ? "alert" : null }, text);
    const again = failed || !message.text;
    const shorten = h("button", { type: "button", onclick: () => actions.shorten() }, "Leave out old messages");
    const resumes = message.text && (message.state !== "done" || message.finish === "length");
    const ways = full ? [shorten] : [resumes && resume, again && retry];
    trouble?.append(h("div", { class: "trouble" }, note, ...ways));
  }

  /** @param {boolean} running */
  showFoot(running) {
    const { message, actions } = this;
    const foot = /** @type {HTMLElement} */ (this.foot);
    const text = figureText(message);
    // The figures change after the buttons are shown, and one of those may have the focus by then.
    const state = JSON.stringify([running, this.siblings.map(({ id }) => id)]);
    if (this.shownFoot === state) {
      foot.lastElementChild?.replaceChildren(text);
      return;
    }
    this.shownFoot = state;
    const figures = h("span", { class: "figures" }, text);
    if (running) {
      foot.replaceChildren(figures);
      return;
    }
    const reply = message.role === "assistant";
    const buttons = [
      iconButton("copy", "Copy the message", () => copyText(message.text)),
      message.role === "user" && iconButton("edit", "Edit the message", () => this.startEdit()),
      reply && iconButton("edit", "Edit the response", () => this.startEdit()),
      reply && iconButton("retry", "Regenerate", () => actions.retry(message)),
      message.role !== "tool" && iconButton("trash", "Delete from here", () => actions.remove(message)),
    ];
    foot.replaceChildren(this.branches(), h("span", { class: "buttons" }, ...buttons), figures);
  }

  branches() {
    const { siblings, message } = this;
    const at = siblings.indexOf(message);
    if (siblings.length < 2) return h("span", { hidden: true });
    const go = (/** @type {number} */ to) => () => this.actions.select(this.siblings[to]);
    return h(
      "span",
      { class: "branches", role: "group", "aria-label": "Branches" },
      iconButton("left", "Previous branch", go(at - 1), { disabled: at === 0 }),
      h("span", {}, `${at + 1}/${siblings.length}`),
      iconButton("right", "Next branch", go(at + 1), { disabled: at === siblings.length - 1 }),
    );
  }

  /** @param {boolean} [focus] whether the form gets the focus */
  startEdit(focus = true) {
    if (this.form) return;
    const { actions, message } = this;
    this.form = new EditForm(message, actions.reader, {
      mayBeSent: (text, attached) => actions.mayBeSent(message, text, attached),
      send: (text, attached, more) =>
        message.role === "assistant"
          ? actions.editReply(message, text, more)
          : actions.edit(message, text, attached),
      close: () => this.endEdit(),
      open: () => this.startEdit(),
    });
    this.text.replaceWith(this.form.element);
    this.text.hidden = false;
    this.element.classList.add("editing");
    this.unsent = false;
    this.showTrouble();
    if (focus) this.form.area.focus();
  }

  endEdit() {
    this.form?.element.replaceWith(this.text);
    this.form = null;
    this.element.classList.remove("editing");
    this.text.hidden = !this.message.text;
    this.unsent = draftOf(editKey(this.message)) !== null;
    this.showTrouble();
    this.element.focus();
  }
}

/**
 * Returns why a response is not complete; "" if it is.
 * @param {Message} message
 * @param {boolean} full whether its context is full
 */
function troubleOf(message, full) {
  if (message.role !== "assistant") return "";
  if (message.state === "stopped") return "Stopped before the end.";
  if (full) return "The context is full. Leave out the oldest messages, or begin a new conversation.";
  if (message.state === "failed") {
    const left = isEmptyFailure(message) ? " This turn is not sent with the next message." : "";
    return `${(message.error ?? "The response failed.").replace(/([^.!?])$/, "$1.")}${left}`;
  }
  if (message.state === "done" && message.finish === "length") return "The response reached its maximum of tokens.";
  const empty = message.state === "done" && !message.text.trim() && !message.calls.length;
  return empty ? "The model returned an empty response." : "";
}

/** @param {number} created */
function timeOf(created) {
  const date = new Date(created);
  const today = date.toDateString() === new Date().toDateString();
  const shown = today ? TIME.format(date) : DATE.format(date);
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, shown);
}

const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** @param {number} value */
const count = (value) => value.toLocaleString("en");

/**
 * Returns how much of a prompt is left: the tiles of pictures, because they take much longer than their tokens;
 * else the time.
 * @param {Progress} progress
 */
function rest(progress) {
  const { tiles = 0, tiles_read: read = 0 } = progress;
  return read < tiles ? `, ${count(read)} of ${count(tiles)} tiles of pictures` : remaining(progress);
}

/**
 * Returns how long the rest of the prompt takes if it goes on as before.
 * @param {Progress} progress
 */
function remaining({ total, cache, processed, time_ms }) {
  const computed = processed - cache;
  if (computed <= 0 || time_ms <= 0) return "";
  const seconds = Math.ceil(((total - processed) / computed) * (time_ms / 1000));
  const left = seconds < 90 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  return `, about ${left} left`;
}

/** @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {Message} message */
function figureText(message) {
  const figures = message.figures;
  const edited = message.edited ? ["edited"] : [];
  if (!figures?.tokens) return edited.join("");
  const parts = [...edited, `${figures.tokens} tokens`];
  if (figures.seconds > 0) parts.push(`${rate((figures.tokens - 1) / figures.seconds)} tokens/s`);
  parts.push(`first after ${figures.first < 10 ? figures.first.toFixed(2) : Math.round(figures.first)} s`);
  if (figures.prompt) {
    const share = Math.round((100 * figures.cached) / figures.prompt);
    const pictures = figures.pictures ? ` (${figures.pictures} of pictures)` : "";
    parts.push(`prompt ${figures.prompt}${pictures}, ${share} % cached`);
  }
  return parts.join(" · ");
}

/** @param {number} value */
const rate = (value) => (value < 10 ? value.toFixed(1) : String(Math.round(value)));
