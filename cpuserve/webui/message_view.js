/** The DOM of one message: text, thoughts, pictures, tool calls, timing figures and buttons. */

import { h, icon, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** @typedef {import("./conversation.js").Message} Message */

/**
 * The functions that the buttons of a message call.
 * @typedef {object} Actions
 * @property {(message: Message, text: string) => void} edit
 * @property {(message: Message) => void} retry
 * @property {(message: Message) => void} resume
 * @property {(message: Message) => void} remove
 * @property {(message: Message) => void} select
 * @property {(message: Message, callId: string, result: string) => void} result
 */

const ROLES = { user: "You", assistant: "Model", tool: "Tool" };

export class MessageView {
  /**
   * @param {Message} message
   * @param {Message[]} siblings the branches at this place, with the message
   * @param {Actions} actions
   */
  constructor(message, siblings, actions) {
    this.message = message;
    this.siblings = siblings;
    this.actions = actions;
    this.thoughtText = h("div", { class: "prose" });
    this.thought = /** @type {HTMLDetailsElement} */ (
      h("details", { class: "thought" }, h("summary", {}, "Thoughts"), this.thoughtText)
    );
    this.text = h("div", { class: "prose" });
    this.calls = h("div", { class: "calls" });
    this.trouble = h("div");
    this.foot = h("footer", {});
    const name = message.role === "assistant" ? (message.model ?? ROLES.assistant) : ROLES[message.role];
    this.element = h(
      "article",
      { class: `message ${message.role}`, id: `m-${message.id}`, "aria-label": name, tabindex: "-1" },
      h("header", {}, message.role === "tool" ? this.toolTitle() : name),
      ...this.attachments(),
      this.thought,
      this.text,
      this.calls,
      this.trouble,
      this.foot,
    );
    this.update(false);
  }

  toolTitle() {
    return h("span", {}, icon("tool"), ` ${this.message.name ?? "tool"} returned`);
  }

  attachments() {
    const { images, files } = this.message;
    const pictures = images.map((src, i) => h("img", { src, alt: `Attached picture ${i + 1}` }));
    const texts = files.map((file) =>
      h("details", { class: "file" }, h("summary", {}, file.name), h("pre", { tabindex: "0" }, file.text)),
    );
    return pictures.length + texts.length ? [h("div", { class: "attachments" }, ...pictures, ...texts)] : [];
  }

  /**
   * Updates the page to the current state of the message.
   * @param {boolean} running whether more of it will come
   * @param {Set<string>} [open] the calls that wait for a result of the user
   */
  update(running, open = new Set()) {
    const { message } = this;
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    this.thought.hidden = !message.thought;
    if (message.thought) {
      const thinking = running && !message.text && !message.calls.length;
      this.thought.classList.toggle("thinking", thinking);
      this.thought.firstElementChild?.replaceChildren(thinking ? "Thinking…" : "Thoughts");
      showMarkdown(this.thoughtText, message.thought);
    }
    if (message.role === "assistant") showMarkdown(this.text, message.text);
    else this.text.replaceChildren(h("p", { class: "plain" }, message.text));
    this.text.hidden = !message.text;
    this.showCalls(open);
    this.showTrouble(running);
    this.showFoot(running);
  }

  /** @param {Set<string>} open */
  showCalls(open) {
    const shown = this.message.calls.map((call) => {
      const given = h("pre", { tabindex: "0" }, pretty(call.function.arguments));
      const title = h("summary", {}, icon("tool"), ` ${call.function.name}`);
      return h(
        "details",
        { class: "call", open: open.has(call.id) },
        title,
        given,
        open.has(call.id) && this.resultForm(call.id),
      );
    });
    // Keep the form while the user writes in it: rebuild it only if the calls have changed.
    const state = JSON.stringify([this.message.calls, [...open]]);
    if (this.calls.dataset.state !== state) this.calls.replaceChildren(...shown);
    this.calls.dataset.state = state;
  }

  /** @param {string} id */
  resultForm(id) {
    const text = /** @type {HTMLTextAreaElement} */ (
      h("textarea", { rows: 3, "aria-label": "Result of the call", placeholder: "Result of the call" })
    );
    const send = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.actions.result(this.message, id, text.value);
    };
    return h("form", { class: "result", onsubmit: send }, text, h("button", { class: "primary" }, "Return"));
  }

  /** @param {boolean} running */
  showTrouble(running) {
    const { error, finish, role } = this.message;
    const cut = finish === "length" ? "The response reached its maximum of tokens." : "";
    const text = running || role !== "assistant" ? "" : (error ?? cut);
    this.trouble.replaceChildren();
    if (!text) return;
    const resume = h("button", { type: "button", onclick: () => this.actions.resume(this.message) }, "Continue");
    const retry = h("button", { type: "button", onclick: () => this.actions.retry(this.message) }, "Retry");
    const note = h("p", { class: error ? "wrong" : "note", role: error ? "alert" : null }, text);
    this.trouble.append(h("div", { class: "trouble" }, note, this.message.text && resume, error && retry));
  }

  /** @param {boolean} running */
  showFoot(running) {
    const { message, actions } = this;
    const figures = h("span", { class: "figures" }, figureText(message));
    if (running) {
      this.foot.replaceChildren(figures);
      return;
    }
    const buttons = [
      iconButton("copy", "Copy the message", () => navigator.clipboard.writeText(message.text)),
      message.role === "user" && iconButton("edit", "Edit the message", () => this.startEdit()),
      message.role === "assistant" && iconButton("retry", "Regenerate", () => actions.retry(message)),
      message.role !== "tool" && iconButton("trash", "Delete from here", () => actions.remove(message)),
    ];
    this.foot.replaceChildren(this.branches(), h("span", { class: "buttons" }, ...buttons), figures);
  }

  branches() {
    const { siblings, message } = this;
    const at = siblings.indexOf(message);
    if (siblings.length < 2) return h("span", { hidden: true });
    const go = (/** @type {number} */ to) => () => this.actions.select(siblings[to]);
    return h(
      "span",
      { class: "branches", role: "group", "aria-label": "Branches" },
      iconButton("left", "Previous branch", go(at - 1), { disabled: at === 0 }),
      h("span", {}, `${at + 1}/${siblings.length}`),
      iconButton("right", "Next branch", go(at + 1), { disabled: at === siblings.length - 1 }),
    );
  }

  startEdit() {
    const area = /** @type {HTMLTextAreaElement} */ (h("textarea", { "aria-label": "Edited message" }));
    area.value = this.message.text;
    area.rows = Math.min(16, area.value.split("\n").length + 1);
    const stop = () => {
      form.replaceWith(this.text);
      this.element.focus();
    };
    const send = () => this.actions.edit(this.message, area.value);
    const form = h(
      "form",
      { class: "edit", onsubmit: (/** @type {Event} */ e) => (e.preventDefault(), send()) },
      area,
      h("span", {}, h("button", { class: "primary" }, "Send"), h("button", { type: "button", onclick: stop }, "Cancel")),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") stop();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
      event.stopPropagation();
    });
    this.text.replaceWith(form);
    area.focus();
  }
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
  if (!figures?.tokens) return "";
  const parts = [`${figures.tokens} tokens`];
  if (figures.seconds > 0) parts.push(`${rate((figures.tokens - 1) / figures.seconds)} tokens/s`);
  parts.push(`first after ${figures.first < 10 ? figures.first.toFixed(2) : Math.round(figures.first)} s`);
  if (figures.prompt) {
    const share = Math.round((100 * figures.cached) / figures.prompt);
    parts.push(`prompt ${figures.prompt}, ${share} % cached`);
  }
  return parts.join(" · ");
}

/** @param {number} value */
const rate = (value) => (value < 10 ? value.toFixed(1) : String(Math.round(value)));
