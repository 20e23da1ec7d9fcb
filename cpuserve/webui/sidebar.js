/** The list of conversations: search, selection, deletion, export and import. */

import { byId, h, iconButton } from "./dom.js";
import * as history from "./history.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

export class Sidebar {
  /** @param {{select: (conversation: Conversation) => void, create: () => void}} page */
  constructor(page) {
    this.page = page;
    /** @type {Conversation[]} */
    this.all = [];
    /** @type {string | undefined} */
    this.current = undefined;
    this.search = /** @type {HTMLInputElement} */ (byId("search"));
    this.search.addEventListener("input", () => this.draw());
    byId("new").addEventListener("click", () => page.create());
    byId("export").addEventListener("click", () => this.export());
    const file = /** @type {HTMLInputElement} */ (byId("import-file"));
    byId("import").addEventListener("click", () => file.click());
    file.addEventListener("change", () => this.import(file));
  }

  async load() {
    const stored = await history.loadAll();
    // The user may have begun a conversation while the stored ones were loading.
    const begun = this.all.filter((one) => !stored.some((other) => other.id === one.id));
    this.all = [...begun, ...stored];
    this.draw();
  }

  /**
   * Keeps a conversation, and shows it first in the list.
   * @param {Conversation} conversation
   */
  async keep(conversation) {
    this.all = [conversation, ...this.all.filter((other) => other.id !== conversation.id)];
    this.draw();
    await history.save(conversation);
  }

  /** @param {Conversation} conversation */
  select(conversation) {
    this.current = conversation.id;
    this.draw();
  }

  draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const shown = this.all.filter((conversation) => !wanted || contains(conversation, wanted));
    byId("conversations").replaceChildren(...shown.map((conversation) => this.row(conversation)));
  }

  /** @param {Conversation} conversation */
  row(conversation) {
    const current = conversation.id === this.current ? "true" : null;
    const title = conversation.title || "New conversation";
    const open = h(
      "button",
      { type: "button", class: "open", "aria-current": current, onclick: () => this.page.select(conversation) },
      title,
    );
    const remove = iconButton("trash", `Delete ${title}`, () => this.remove(conversation));
    return h("li", {}, open, remove);
  }

  /** @param {Conversation} conversation */
  async remove(conversation) {
    if (!confirm(`Delete the conversation "${conversation.title}"?`)) return;
    this.all = this.all.filter((other) => other !== conversation);
    await history.remove(conversation.id);
    this.draw();
    if (conversation.id === this.current) this.page.create();
  }

  export() {
    const blob = new Blob([history.exported(this.all)], { type: "application/json" });
    const link = h("a", { href: URL.createObjectURL(blob), download: "cpuserve-conversations.json" });
    link.click();
    URL.revokeObjectURL(link.getAttribute("href") ?? "");
  }

  /** @param {HTMLInputElement} input */
  async import(input) {
    const file = input.files?.[0];
    input.value = "";
    if (!file) return;
    try {
      for (const conversation of history.imported(await file.text())) await this.keep(conversation);
    } catch (error) {
      alert(error instanceof Error ? error.message : error);
    }
  }
}

/**
 * @param {Conversation} conversation
 * @param {string} wanted
 */
function contains(conversation, wanted) {
  const texts = Object.values(conversation.messages).map((message) => message.text);
  return [conversation.title, ...texts].some((text) => text.toLowerCase().includes(wanted));
}
