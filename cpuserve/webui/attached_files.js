/** The files of a message that is not sent yet: reads them, shows them, and keeps them. */

import { documentText, measured, pictureText, readFile, textSize } from "./attachments.js";
import { h, iconButton } from "./dom.js";

/**
 * @typedef {import("./attachments.js").Attached} Attached
 * @typedef {import("./attachments.js").Item} Item
 *
 * @typedef {object} Reader how files are read
 * @property {() => boolean} readsPictures
 * @property {import("./attachments.js").Measure} measure
 * @property {(text: string) => void} announce for screen readers
 * @property {(texts: string[]) => void} complain
 */

export class AttachedFiles {
  /**
   * @param {Reader} reader
   * @param {{changed: () => void, focus: () => void}} page changed: the files are others now
   * @param {Promise<Attached | null> | null} [kept] files of an earlier visit
   */
  constructor(reader, page, kept = null) {
    this.reader = reader;
    this.page = page;
    /** @type {Attached} */
    this.lists = { images: [], documents: [], files: [] };
    this.element = h("ul", { class: "attached", "aria-label": "Attached files", hidden: true });
    /** @type {Promise<void> | null} the files that are being read */
    this.reading = null;
    if (kept) this.soon(kept.then((lists) => lists && this.put(lists)));
  }

  get isEmpty() {
    return !Object.values(this.lists).some((list) => list.length);
  }

  /** @param {Attached} lists */
  put({ images, documents, files }) {
    this.lists.images.push(...images);
    this.lists.documents.push(...documents);
    this.lists.files.push(...files);
  }

  /** Waits until no file is being read. */
  async settled() {
    while (this.reading) await this.reading;
  }

  /**
   * Reads files, one selection after another.
   * @param {File[]} files
   */
  async add(files) {
    if (files.length) await this.soon(this.read(files, this.reading));
  }

  /** @param {Promise<unknown>} work */
  async soon(work) {
    const reading = work.then(() => {});
    this.reading = reading;
    this.draw();
    await reading;
    if (this.reading === reading) this.reading = null;
    this.draw();
  }

  /**
   * @param {File[]} files
   * @param {Promise<void> | null} before
   */
  async read(files, before) {
    await before;
    /** @type {string[]} */
    const told = [];
    /** @type {string[]} */
    const errors = [];
    for (const file of files) {
      try {
        const item = await readFile(file, this.reader.readsPictures());
        told.push(await this.take(item, file.name));
      } catch (error) {
        errors.push(`${file.name}: ${error instanceof Error ? error.message : error}`);
      }
    }
    if (told.length) this.reader.announce(told.join(". "));
    if (errors.length) this.reader.complain(errors);
  }

  /**
   * Adds a file, which is kept before the server has said how large it is, and removed if the server refuses it.
   * @param {Item} item
   * @param {string} name
   * @returns {Promise<string>} a text for screen readers
   */
  async take(item, name) {
    const list = /** @type {unknown[]} */ (this.lists[item.list]);
    list.push(item.value);
    this.changed();
    try {
      Object.assign(item.value, await measured(item, this.reader.measure));
    } catch (error) {
      // The user may have removed it meanwhile.
      this.lists[item.list] = /** @type {any} */ (list.filter((value) => value !== item.value));
      this.changed();
      throw error;
    }
    this.changed();
    const size = sizeOf(item);
    return `${item.list === "images" ? "Picture" : name} attached${size && `, ${size}`}`;
  }

  changed() {
    this.draw();
    this.page.changed();
  }

  draw() {
    const { images, documents, files } = this.lists;
    const chips = [
      ...images.map((value, i) => this.chip({ list: "images", value }, i, picture(value.url, i), `picture ${i + 1}`)),
      ...documents.map((value, i) => this.chip({ list: "documents", value }, i, h("span", {}, value.name), value.name)),
      ...files.map((value, i) => this.chip({ list: "files", value }, i, h("span", {}, value.name), value.name)),
    ];
    if (this.reading) chips.push(h("li", { class: "chip reading" }, "Reading…"));
    this.element.hidden = !chips.length;
    this.element.replaceChildren(...chips);
  }

  /**
   * @param {Item} item
   * @param {number} at its index in its list
   * @param {HTMLElement} shown
   * @param {string} name
   */
  chip(item, at, shown, name) {
    const remove = () => {
      /** @type {unknown[]} */ (this.lists[item.list]).splice(at, 1);
      this.changed();
      this.page.focus();
    };
    const size = sizeOf(item);
    return h("li", { class: "chip" }, shown, size && h("small", {}, size), iconButton("close", `Remove ${name}`, remove));
  }

  /**
   * Adds files that are pasted into an element.
   * @param {HTMLElement} element
   */
  takePasted(element) {
    element.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
  }
}

/**
 * Returns a picture; a format that browsers do not show is named.
 * @param {string} src
 * @param {number} index
 * @param {string} [label]
 */
export function picture(src, index, label = "Picture") {
  if (src.startsWith("data:image/tiff")) return h("span", {}, `${label} ${index + 1} (TIFF)`);
  return h("img", { src, alt: `${label} ${index + 1}` });
}

/** @param {Item} item */
function sizeOf({ list, value }) {
  if (list === "images") return pictureText(/** @type {import("./attachments.js").Picture} */ (value).seen);
  if (list === "files") return textSize(/** @type {import("./conversation.js").TextFile} */ (value));
  return documentText(/** @type {import("./conversation.js").DocumentFile} */ (value));
}
