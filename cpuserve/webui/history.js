/** Stores conversations in this browser (IndexedDB). */

import { merge } from "./conversation.js";
import { Store } from "./database.js";
import { checked } from "./transfer.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const store = new Store("cpuserve", "conversations");

/** @returns {Promise<Conversation[]>} all conversations that can be shown */
export async function loadAll() {
  const all = (await store.run("readonly", (all) => all.getAll())) ?? [];
  return all.map(checked).filter((one) => one !== null);
}

/**
 * @param {string} id
 * @returns {Promise<Conversation | null>}
 */
export async function load(id) {
  return checked(await store.run("readonly", (all) => all.get(id)));
}

/**
 * Stores conversations in one transaction. Each is first merged with the stored one, because another tab
 * may have changed it since.
 * @param {Conversation[]} conversations
 * @returns {Promise<Conversation[]>} those that the merge has changed
 */
export async function save(conversations) {
  /** @type {Conversation[]} */
  const changed = [];
  await store.run("readwrite", (all) => {
    for (const conversation of conversations) {
      const asked = all.get(conversation.id);
      asked.onsuccess = () => {
        const stored = checked(asked.result);
        if (stored && merge(conversation, stored)) changed.push(conversation);
        all.put(conversation);
      };
    }
    return undefined;
  });
  return changed;
}

/** @param {string} id */
export async function remove(id) {
  await store.run("readwrite", (all) => all.delete(id));
}
