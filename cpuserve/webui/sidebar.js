/** The list of conversations: search, selection, names, pins, deletion, export and import. */

import { byId, composes, h, iconButton } from "./dom.js";
import { notify } from "./notice.js";
import { asMarkdown, exported, fileName, imported } from "./transfer.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const DAY_MS = 86_400_000;
const MONTH = new Intl.DateTimeFormat(undefined, { month: "long", year: "numeric" });
const FULL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export class Sidebar {
  /**
   * @param {import("./library.js").Library} library
   * @param {{
   *   select: (conversation: Conversation) => void,
   *   create: () => void,
   *   running: (conversation: Conversation) => boolean,
   *   rename: (conversation: Conversation, title: string) => void,
   *   pin: (conversation: Conversation, pinned: boolean) => void,
   *   remove: (conversation: Conversation) => void,
   * }} page
   */
  constructor(library, page) {
    this.library = library;
    this.page = page;
    /** @type {string | undefined} */
    this.current = undefined;
    /** @type {string | null} the conversation whose buttons are shown */
    this.open = null;
    /** @type {Set<string>} conversations with a response that the user has not seen */
    this.unread = new Set();
    this.drawn = "";
    this.renaming = false;
    this.search = /** @type {HTMLInputElement} */ (byId("search"));
    this.search.addEventListener("input", () => this.draw());
    byId("new").addEventListener("click", () => page.create());
    byId("export").addEventListener("click", () => this.export());
    const file = /** @type {HTMLInputElement} */ (byId("import-file"));
    byId("import").addEventListener("click", () => file.click());
    file.addEventListener("change", () => this.import(file));
  }

  /** @param {Conversation} conversation */
  select(conversation) {
    this.current = conversation.id;
    this.unread.delete(conversation.id);
    this.draw();
  }

  /** Draws the list, unless nothing in it has changed since: a stream stores its conversation every second. */
  draw() {
    if (this.renaming) return;
    const wanted = this.search.value.trim().toLowerCase();
    const all = [...this.library.all.values()].sort((a, b) => b.updated - a.updated);
    const shown = all.filter((one) => !wanted || contains(one, wanted));
    const now = new Date().setHours(0, 0, 0, 0);
    /** @type {Map<string, Conversation[]>} */
    const groups = new Map();
    for (const one of [...shown.filter((each) => each.pinned), ...shown.filter((each) => !each.pinned)]) {
      const name = one.pinned ? "Pinned" : dayOf(one.updated, now);
      groups.set(name, [...(groups.get(name) ?? []), one]);
    }
    const state = shown.map((one) => [one.id, one.title, one.pinned, this.markOf(one)]);
    const drawn = JSON.stringify([state, this.current, this.open, now, [...groups.keys()]]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const sections = [...groups].map(([name, list]) =>
      h("section", {}, h("h2", {}, name), h("ul", {}, ...list.map((one) => this.row(one)))),
    );
    byId("conversations").replaceChildren(...sections);
  }

  /**
   * Draws the list again, with the focus on a control of a conversation's row.
   * @param {Conversation} conversation
   * @param {string} selector
   */
  drawAndFocus(conversation, selector) {
    this.draw();
    const row = document.getElementById(`c-${conversation.id}`);
    /** @type {HTMLElement | null | undefined} */ (row?.querySelector(selector))?.focus();
  }

  /** @param {Conversation} conversation */
  markOf(conversation) {
    if (this.page.running(conversation)) return "running";
    return this.unread.has(conversation.id) ? "unread" : "";
  }

  /** @param {Conversation} conversation */
  row(conversation) {
    const current = conversation.id === this.current ? "true" : null;
    const title = conversation.title || "New conversation";
    const mark = this.markOf(conversation);
    const open = this.open === conversation.id;
    const tip = `${title}\n${FULL.format(new Date(conversation.updated))}`;
    const select = h(
      "button",
      { type: "button", class: "open", "aria-current": current, title: tip, onclick: () => this.page.select(conversation) },
      mark && h("span", { class: `mark ${mark}`, role: "img", "aria-label": mark === "running" ? "Writing" : "New" }),
      h("span", { class: "title", dir: "auto" }, title),
    );
    const toggle = () => {
      this.open = open ? null : conversation.id;
      this.drawAndFocus(conversation, open ? ".more" : ".row-actions button");
    };
    const more = iconButton("more", `More for ${title}`, toggle, { class: "icon-button more", "aria-expanded": String(open) });
    return h("li", { id: `c-${conversation.id}` }, h("div", { class: "row" }, select, more), open && this.actions(conversation));
  }

  /** @param {Conversation} conversation */
  actions(conversation) {
    const button = (/** @type {string} */ text, /** @type {() => void} */ act) =>
      h("button", { type: "button", onclick: act }, text);
    const close = (/** @type {() => void} */ act) => () => {
      this.open = null;
      act();
      this.drawAndFocus(conversation, ".more");
    };
    const { pinned } = conversation;
    return h(
      "div",
      { class: "row-actions", role: "group", "aria-label": `Actions for ${conversation.title || "New conversation"}` },
      button("Rename", () => this.rename(conversation)),
      button(pinned ? "Unpin" : "Pin", close(() => this.page.pin(conversation, !pinned))),
      button("Markdown", close(() => this.exportMarkdown(conversation))),
      button("Delete", close(() => this.page.remove(conversation))),
    );
  }

  /** @param {Conversation} conversation */
  rename(conversation) {
    const row = document.getElementById(`c-${conversation.id}`);
    const field = /** @type {HTMLInputElement} */ (
      h("input", { class: "rename", "aria-label": "Name of the conversation", dir: "auto", maxlength: 200 })
    );
    field.value = conversation.title;
    let ended = false;
    const end = (/** @type {boolean} */ keep) => {
      if (ended) return;
      ended = true;
      const title = field.value.trim();
      this.open = null;
      this.drawn = "";
      this.renaming = false;
      if (keep && title) this.page.rename(conversation, title);
      this.drawAndFocus(conversation, ".more");
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (composes(event)) return;
      if (event.key === "Enter") {
        // Else the same key would click the button that gets the focus.
        event.preventDefault();
        end(true);
      }
      if (event.key === "Escape") end(false);
    });
    field.addEventListener("blur", () => end(true));
    this.renaming = true;
    row?.replaceChildren(field);
    field.select();
  }

  export() {
    download("cpuserve-conversations.json", exported([...this.library.all.values()]), "application/json");
  }

  /** @param {Conversation} conversation */
  exportMarkdown(conversation) {
    download(`${fileName(conversation.title)}.md`, asMarkdown(conversation), "text/markdown");
  }

  /** @param {HTMLInputElement} input */
  async import(input) {
    const file = input.files?.[0];
    input.value = "";
    if (!file) return;
    try {
      const { conversations, damaged } = imported(await file.text());
      await this.library.add(conversations);
      const left = damaged ? ` ${damaged} of the file's conversations are damaged and were left out.` : "";
      notify(`${conversations.length} conversations are imported.${left}`);
    } catch (error) {
      notify(error instanceof Error ? error.message : String(error));
    }
  }
}

/**
 * @param {string} name
 * @param {string} text
 * @param {string} type
 */
function download(name, text, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.getAttribute("href") ?? "");
}

/**
 * Returns the name of the group of a time.
 * @param {number} time
 * @param {number} today the beginning of the day
 */
function dayOf(time, today) {
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 7 * DAY_MS) return "Last 7 days";
  return MONTH.format(new Date(time));
}

/**
 * @param {Conversation} conversation
 * @param {string} wanted
 */
function contains(conversation, wanted) {
  if (conversation.title.toLowerCase().includes(wanted)) return true;
  return Object.values(conversation.messages).some((message) => message.text.toLowerCase().includes(wanted));
}
