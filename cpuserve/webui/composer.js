/** The input field for messages: its size, attached files, and the button that sends or stops. */

import { readFiles } from "./attachments.js";
import { byId, h, icon, iconButton } from "./dom.js";

/**
 * @typedef {import("./conversation.js").TextFile} TextFile
 * @typedef {{text: string, images: string[], files: TextFile[]}} Draft
 */

const DRAFT_MS = 300;
// What file choosers offer for a model that reads no pictures; others can still be chosen or dropped.
const TEXT_TYPES = "text/*,application/json,.md,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.toml,.yaml,.yml,.csv,.log,.sql";

export class Composer {
  /**
   * @param {{
   *   send: (text: string, images: string[], files: TextFile[]) => void,
   *   stop: () => void,
   *   draft: (text: string) => void,
   *   complain: (text: string) => void,
   * }} page `draft` keeps a text that is not sent yet
   */
  constructor(page) {
    this.page = page;
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.button = byId("send");
    this.running = false;
    this.readsPictures = true;
    this.timer = 0;
    this.kept = "";
    /** @type {string[]} */
    this.images = [];
    /** @type {TextFile[]} */
    this.files = [];
    const choose = /** @type {HTMLInputElement} */ (byId("attach-file"));
    byId("attach").append(icon("clip"));
    byId("attach").addEventListener("click", () => choose.click());
    choose.addEventListener("change", async () => {
      await this.attach([...(choose.files ?? [])]);
      choose.value = "";
    });
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) page.stop();
      else this.submit();
    });
    this.input.addEventListener("input", () => {
      this.resize();
      this.keepDraftSoon();
    });
    window.addEventListener("pagehide", () => this.keepDraft());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    this.input.addEventListener("paste", (event) => this.onPaste(event));
    const view = byId("chat");
    view.addEventListener("dragover", (event) => event.preventDefault());
    view.addEventListener("drop", (event) => {
      event.preventDefault();
      this.attach([...(event.dataTransfer?.files ?? [])]);
    });
    this.setRunning(false);
  }

  keepDraftSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.keepDraft(), DRAFT_MS);
  }

  keepDraft() {
    clearTimeout(this.timer);
    if (this.kept !== this.input.value) this.page.draft(this.input.value);
    this.kept = this.input.value;
  }

  /**
   * Shows the text and the files that are not sent yet, and returns those that were shown before.
   * @param {Draft} draft
   * @returns {Draft}
   */
  exchange({ text, images, files }) {
    this.keepDraft();
    const before = { text: this.input.value, images: this.images, files: this.files };
    this.images = images;
    this.files = files;
    this.drawAttached();
    this.input.value = this.kept = text;
    this.resize();
    return before;
  }

  /**
   * Offers to attach pictures only where the model reads them.
   * @param {boolean} reads
   */
  setPictures(reads) {
    this.readsPictures = reads;
    const label = reads ? "Attach pictures or text files" : "Attach text files";
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
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.running) this.submit();
  }

  /** @param {ClipboardEvent} event */
  onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  /** @param {File[]} files */
  async attach(files) {
    const { images, texts, errors } = await readFiles(files, this.readsPictures);
    this.images.push(...images);
    this.files.push(...texts);
    this.drawAttached();
    if (errors.length) this.page.complain(errors.join("; "));
  }

  drawAttached() {
    const pictures = this.images.map((src, i) =>
      this.chip(h("img", { src, alt: `Picture ${i + 1}` }), `picture ${i + 1}`, () => this.images.splice(i, 1)),
    );
    const texts = this.files.map((file, i) =>
      this.chip(h("span", {}, file.name), file.name, () => this.files.splice(i, 1)),
    );
    const place = byId("attached");
    place.hidden = pictures.length + texts.length === 0;
    place.replaceChildren(...pictures, ...texts);
  }

  /**
   * @param {HTMLElement} shown
   * @param {string} name
   * @param {() => void} remove
   */
  chip(shown, name, remove) {
    const click = () => {
      remove();
      this.drawAttached();
    };
    return h("span", { class: "chip" }, shown, iconButton("close", `Remove ${name}`, click));
  }

  submit() {
    const text = this.input.value.trim();
    if (!text && !this.images.length && !this.files.length) return;
    const { images, files } = this;
    this.images = [];
    this.files = [];
    this.drawAttached();
    this.setText("");
    this.keepDraft();
    this.page.send(text, images, files);
  }
}
