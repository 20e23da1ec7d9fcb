/** The input field for messages: its size, the files of the draft, and the button that sends or stops. */

import { byId, composes, icon } from "./dom.js";

/** @typedef {import("./draft_message.js").DraftMessage} DraftMessage */

// What file choosers offer for a model that reads no pictures; others can still be chosen or dropped.
const TEXT_TYPES =
  "text/*,application/json,application/pdf,.docx,.md,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.toml,.yaml,.yml,.csv,.log,.sql";

export class Composer {
  /**
   * @param {{
   *   send: (draft: DraftMessage) => void,
   *   stop: () => void,
   *   readsPictures: () => boolean,
   *   complain: (texts: string[]) => void,
   * }} page
   * @param {DraftMessage} draft
   */
  constructor(page, draft) {
    this.page = page;
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.button = byId("send");
    this.running = false;
    this.draft = draft;
    const choose = /** @type {HTMLInputElement} */ (byId("attach-file"));
    byId("attach").append(icon("clip"));
    byId("attach").addEventListener("click", () => choose.click());
    choose.addEventListener("change", async () => {
      await this.draft.files.add([...(choose.files ?? [])]);
      choose.value = "";
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) page.stop();
      else this.submit();
    });
    this.input.addEventListener("input", () => {
      this.resize();
      this.draft.write(this.input.value);
    });
    window.addEventListener("pagehide", () => this.draft.keep());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    this.input.addEventListener("paste", (event) => this.onPaste(event));
    this.setRunning(false);
    this.show(draft);
  }

  /**
   * Shows a message that is not sent yet, instead of the one before it.
   * @param {DraftMessage} draft
   */
  show(draft) {
    this.draft.keep();
    this.draft = draft;
    byId("attached").replaceChildren(draft.files.element);
    this.input.value = draft.text;
    this.resize();
  }

  /**
   * Offers to attach pictures only where the model reads them.
   * @param {boolean} reads
   */
  setPictures(reads) {
    const label = reads ? "Attach pictures, PDF, Word or text files" : "Attach PDF, Word or text files";
    byId("attach").setAttribute("aria-label", label);
    byId("attach").setAttribute("title", label);
    byId("attach-file").toggleAttribute("accept", !reads);
    if (!reads) byId("attach-file").setAttribute("accept", TEXT_TYPES);
  }

  /** @param {boolean} running */
  setRunning(running) {
    this.running = running;
    const label = running ? "Stop" : "Send";
    this.button.setAttribute("aria-label", label);
    this.button.setAttribute("title", label);
    this.button.classList.toggle("stop", running);
    this.button.replaceChildren(icon(running ? "stop" : "send"));
  }

  /** @param {string} text */
  setText(text) {
    this.input.value = text;
    this.draft.write(text);
    this.resize();
    this.input.focus();
  }

  resize() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    // While an input method composes a character, Enter selects it.
    if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
    event.preventDefault();
    if (!this.running) this.submit();
  }

  /** @param {ClipboardEvent} event */
  onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.draft.files.add(files);
  }

  async submit() {
    const { draft } = this;
    draft.text = this.input.value;
    await draft.settled();
    // It is sent already, or the user looks at another conversation now.
    if (draft !== this.draft) return;
    draft.text = this.input.value;
    if (!draft.text.trim() && draft.files.isEmpty) return;
    if (!this.page.readsPictures() && draft.files.lists.images.length) {
      this.page.complain(["The chosen model reads no pictures: remove them, or choose a model that reads them."]);
      return;
    }
    this.page.send(draft);
  }
}
