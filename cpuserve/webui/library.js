/** All conversations of this browser: loads and stores them, and merges the changes of other tabs. */

import { change, merge } from "./conversation.js";
import * as history from "./history.js";
import { local } from "./storage.js";
import { Tabs } from "./tabs.js";
import { checked } from "./transfer.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 */

const ASK_AGAIN_MS = 3000;
// What is not stored yet of the conversation with this id. IndexedDB cannot be written while a page closes, so
// the page that is opened next takes it from here.
const LEFT = "cpuserve.left.";
// Pictures that are not stored yet are in a draft; localStorage has no room for them.
const MOST_LEFT = 1_000_000;

export class Library {
  /**
   * @param {{
   *   listed: () => void,
   *   merged: (conversation: Conversation) => void,
   *   removed: (conversation: Conversation) => void,
   *   streams: (id: string) => boolean,
   *   stop: (id: string) => void,
   *   complain: (text: string) => void,
   * }} page
   *   listed: the list has changed; merged: another tab has changed a conversation; streams, stop: about a
   *   message that this tab generates
   */
  constructor(page) {
    this.page = page;
    /** @type {Map<string, Conversation>} */
    this.all = new Map();
    /** @type {Set<string>} messages of other tabs that this tab asks about */
    this.watched = new Set();
    /** @type {Set<string>} conversations that other tabs have changed while this tab was hidden */
    this.late = new Set();
    this.stores = true;
    /** @type {Map<string, number>} until when the changes of a conversation are stored, in ms since 1970 */
    this.saved = new Map();
    /** @type {Map<string, number>} when this page left something of a conversation */
    this.leftAt = new Map();
    this.tabs = new Tabs({
      saved: (id) => this.takeOver(id),
      removed: (id) => this.forget(id),
      stop: page.stop,
      streams: page.streams,
    });
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) return;
      for (const id of this.late) this.takeOver(id);
      this.late.clear();
    });
  }

  async load() {
    try {
      const begun = Date.now();
      for (const one of await history.loadAll()) {
        if (!this.saved.has(one.id)) this.saved.set(one.id, begun);
        // The user may have begun or imported one while the stored ones were loading.
        const known = this.all.get(one.id);
        if (known) merge(known, one);
        else this.all.set(one.id, one);
      }
      this.takeLeft();
      for (const one of this.all.values()) this.watch(one);
    } catch (error) {
      // The browser blocks the store: the page goes on without it.
      this.stores = false;
      this.complain(error);
    }
    this.page.listed();
  }

  /**
   * Keeps at once what has changed in a conversation since it was stored; the next page that loads takes it over.
   * @param {Conversation} conversation
   */
  leave(conversation) {
    if (!this.stores) return;
    const since = this.saved.get(conversation.id) ?? 0;
    const changed = Object.entries(conversation.messages).filter(([, message]) => message.changed >= since);
    const left = JSON.stringify({ ...conversation, messages: Object.fromEntries(changed) });
    if (left.length > MOST_LEFT) return;
    local.set(LEFT + conversation.id, left);
    this.leftAt.set(conversation.id, Date.now());
  }

  /** Keeps what is not stored while the page closes. */
  leaveUnsaved() {
    for (const one of this.all.values()) {
      const since = this.saved.get(one.id) ?? 0;
      const changes = [one.stamps, one.removed].flatMap((times) => Object.values(times));
      const all = [...changes, ...Object.values(one.messages).map(({ changed }) => changed)];
      if (all.some((time) => time >= since)) this.leave(one);
    }
  }

  takeLeft() {
    for (const name of local.names(LEFT)) {
      const left = parsed(local.get(name) ?? "");
      const known = this.all.get(name.slice(LEFT.length));
      const newer = known ? left && merge(known, left) && known : checked(left);
      if (newer) this.keep(newer).then(() => local.set(name, null));
      else local.set(name, null);
    }
  }

  /**
   * Stores conversations, unless they have no messages yet.
   * @param {...Conversation} conversations
   * @returns {Promise<boolean>} whether they are stored, or cannot be
   */
  async keep(...conversations) {
    const kept = conversations.filter((one) => this.all.has(one.id) || Object.keys(one.messages).length);
    if (!kept.length) return true;
    for (const one of kept) this.all.set(one.id, one);
    this.page.listed();
    if (!this.stores) return true;
    const begun = Date.now();
    try {
      for (const one of await history.save(kept)) this.page.merged(one);
      for (const { id } of kept) {
        this.saved.set(id, begun);
        if ((this.leftAt.get(id) ?? Infinity) < begun) local.set(LEFT + id, null);
        this.tabs.tell("saved", id);
      }
      return true;
    } catch (error) {
      this.complain(error);
      return false;
    }
  }

  /**
   * Adds the conversations of a file; those that exist already are merged with it.
   * @param {Conversation[]} conversations
   */
  async add(conversations) {
    const kept = conversations.map((one) => {
      const known = this.all.get(one.id);
      for (const message of Object.values(one.messages)) {
        if (message.state === "streaming") message.state = "stopped";
      }
      if (known) merge(known, one);
      return known ?? one;
    });
    await this.keep(...kept);
    kept.forEach((one) => this.page.merged(one));
  }

  /** @param {Conversation} conversation */
  async remove(conversation) {
    this.all.delete(conversation.id);
    local.set(LEFT + conversation.id, null);
    this.page.listed();
    if (!this.stores) return;
    try {
      await history.remove(conversation.id);
      this.tabs.tell("removed", conversation.id);
    } catch (error) {
      this.complain(error);
    }
  }

  /**
   * Asks the tab that generates a message to stop.
   * @param {Message} message
   */
  stopElsewhere(message) {
    this.tabs.tell("stop", message.id);
  }

  /** @param {string} id */
  async takeOver(id) {
    if (document.hidden) {
      this.late.add(id);
      return;
    }
    const stored = await history.load(id).catch(() => null);
    if (!stored) return;
    const known = this.all.get(id);
    if (known && !merge(known, stored)) return;
    const one = known ?? stored;
    this.all.set(id, one);
    this.page.listed();
    this.page.merged(one);
    this.watch(one);
  }

  /** @param {string} id */
  forget(id) {
    const known = this.all.get(id);
    if (!known) return;
    this.all.delete(id);
    this.page.removed(known);
    this.page.listed();
  }

  /**
   * Marks responses as stopped whose tab has been closed.
   * @param {Conversation} conversation
   */
  watch(conversation) {
    for (const message of Object.values(conversation.messages)) {
      if (message.state === "streaming" && !this.page.streams(message.id) && !this.watched.has(message.id)) {
        this.watched.add(message.id);
        this.settle(conversation, message);
      }
    }
  }

  /**
   * @param {Conversation} conversation
   * @param {Message} message
   */
  async settle(conversation, message) {
    while (message.state === "streaming" && !this.page.streams(message.id)) {
      if (!(await this.tabs.ask(message.id)) && message.state === "streaming") {
        change(message, { state: "stopped" });
        this.page.merged(conversation);
        await this.keep(conversation);
      } else {
        await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MS));
      }
    }
    this.watched.delete(message.id);
  }

  /** @param {unknown} error */
  complain(error) {
    this.page.complain(`This browser does not keep this conversation: ${error}`);
  }
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
