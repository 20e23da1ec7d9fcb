/** All conversations of this browser: loads and stores them, and merges the changes of other tabs. */

import { change, merge } from "./conversation.js";
import * as history from "./history.js";
import { local } from "./storage.js";
import { Tabs } from "./tabs.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 */

const ASK_AGAIN_MS = 3000;
// Messages that streamed when their page was closed. IndexedDB cannot be written while a page closes.
const LEFT = "cpuserve.left";

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
      for (const one of await history.loadAll()) {
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
   * Keeps a message whose page is being closed; the next page that loads takes it into its conversation.
   * @param {Conversation} conversation
   * @param {Message} message
   */
  leave(conversation, message) {
    const left = { ...read(LEFT), [conversation.id]: message };
    local.set(LEFT, JSON.stringify(left));
  }

  takeLeft() {
    for (const [id, message] of Object.entries(read(LEFT))) {
      const known = this.all.get(id);
      const older = known?.messages[message.id];
      if (known && older && merge(known, { ...known, messages: { [message.id]: message } })) this.keep(known);
    }
    local.set(LEFT, null);
  }

  /**
   * Stores conversations, unless they have no messages yet.
   * @param {...Conversation} conversations
   */
  async keep(...conversations) {
    const kept = conversations.filter((one) => this.all.has(one.id) || Object.keys(one.messages).length);
    if (!kept.length) return;
    for (const one of kept) this.all.set(one.id, one);
    this.page.listed();
    if (!this.stores) return;
    try {
      for (const one of await history.save(kept)) this.page.merged(one);
      for (const { id } of kept) this.tabs.tell("saved", id);
    } catch (error) {
      this.complain(error);
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

/**
 * @param {string} name
 * @returns {Record<string, Message>}
 */
function read(name) {
  try {
    return JSON.parse(local.get(name) ?? "{}");
  } catch {
    return {};
  }
}
