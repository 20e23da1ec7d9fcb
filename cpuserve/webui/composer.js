/** The input field for messages: its size, attached files, and the button that sends or stops. */

import { documentText, pictureText, readFiles } from "./attachments.js";
import { byId, h, icon, iconButton } from "./dom.js";

/**
 * @typedef {import("./attachments.js").Attached} Attached
 * @typedef {Attached & {text: string}} Draft
 */

const DRAFT_MS = 300;
// What file choosers offer for a model that reads no pictures; others can still be chosen or dropped.
const TEXT_TYPES = "text/*,application/json,.md,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.toml,.yaml,.yml,.csv,.log,.sql";

export class Composer {
  /**
   * @param {{
   *   send: (text: string, attached: Attached) => void,
   *   measure: import("./attachments.js").Measure,
   *   stop: () => void,
   *   draft: (text: string) => void,
   *   announce: (text: string) => void,
   *   complain: (text: string) => void,
   * }} page `draft` keeps a text that is not sent yet; `announce` is for screen readers
   */
  constructor(page) {
    this.page = page;
    this.input = /** @type {HTMLTextAreaElement} */ (byId("input"));
    this.button = byId("send");
    this.running = false;
    this.readsPictures = true;
    this.timer = 0;
    this.kept = "";
    /** @type {Attached} */
    this.attached = { images: [], documents: [], files: [] };
    /** @type {Promise<void> | null} the files that are being read */
    this.reading = null;
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
    view.addEventListener("dragover", (event) => {
      event.preventDefault();
      view.classList.toggle("dropping", event.dataTransfer?.types.includes("Files"));
    });
    view.addEventListener("dragleave", (event) => {
      if (!view.contains(/** @type {Node | null} */ (event.relatedTarget))) view.classList.remove("dropping");
    });
    view.addEventListener("drop", (event) => {
      event.preventDefault();
      view.classList.remove("dropping");
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
  exchange({ text, images, documents, files }) {
    this.keepDraft();
    // The same lists, into which files may still be read.
    const before = { text: this.input.value, ...this.attached };
    this.attached = { images, documents, files };
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
    const label = reads ? "Attach pictures, PDF or text files" : "Attach text files";
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

  /**
   * Reads files, one selection after another, into the lists that are shown now.
   * @param {File[]} files
   */
  async attach(files) {
    if (!files.length) return;
    const reading = this.read(files, this.attached, this.reading);
    this.reading = reading;
    this.drawAttached();
    await reading;
    if (this.reading === reading) this.reading = null;
    this.drawAttached();
  }

  /**
   * @param {File[]} files
   * @param {Attached} place
   * @param {Promise<void> | null} before
   */
  async read(files, place, before) {
    await before;
    const { errors, ...read } = await readFiles(files, this.readsPictures, this.page.measure);
    place.images.push(...read.images);
    place.documents.push(...read.documents);
    place.files.push(...read.files);
    const told = [
      ...read.images.map(({ seen }) => `Picture attached, ${pictureText(seen)}`),
      ...read.documents.map((each) => `${each.name} attached, ${documentText(each)}`),
      ...read.files.map(({ name }) => `${name} attached`),
    ];
    if (told.length) this.page.announce(told.join(". "));
    if (errors.length) this.page.complain(errors.join("; "));
  }

  drawAttached() {
    const { images, documents, files } = this.attached;
    const chips = [
      ...images.map(({ url, seen }, i) =>
        this.chip(h("img", { src: url, alt: `Picture ${i + 1}` }), pictureText(seen), `picture ${i + 1}`, images, i),
      ),
      ...documents.map((each, i) => this.chip(h("span", {}, each.name), documentText(each), each.name, documents, i)),
      ...files.map(({ name }, i) => this.chip(h("span", {}, name), "", name, files, i)),
    ];
    if (this.reading) chips.push(h("li", { class: "chip reading" }, "Reading…"));
    const place = byId("attached");
    place.hidden = !chips.length;
    place.replaceChildren(...chips);
  }

  /**
   * @param {HTMLElement} shown
   * @param {string} size
   * @param {string} name
   * @param {unknown[]} list the list that has the file at the index `at`
   * @param {number} at
   */
  chip(shown, size, name, list, at) {
    const remove = () => {
      list.splice(at, 1);
      this.drawAttached();
      this.input.focus();
    };
    const button = iconButton("close", `Remove ${name}`, remove);
    return h("li", { class: "chip" }, shown, size && h("small", {}, size), button);
  }

  async submit() {
    while (this.reading) await this.reading;
    const text = this.input.value.trim();
    const { images, documents, files } = this.attached;
    if (!text && !images.length && !documents.length && !files.length) return;
    if (!this.readsPictures && images.length + documents.length) {
      this.page.complain("The chosen model reads no pictures: remove them, or choose a model that reads them.");
      return;
    }
    this.attached = { images: [], documents: [], files: [] };
    this.drawAttached();
    this.setText("");
    this.keepDraft();
    this.page.send(text, { images, documents, files });
  }
}
