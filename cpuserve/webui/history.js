/** Stores conversations in this browser (IndexedDB). */

import { merge } from "./conversation.js";
import { checked } from "./transfer.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const DATABASE = "cpuserve";
const STORE = "conversations";

/** @type {Promise<IDBDatabase> | undefined} */
let opened;

/** @returns {Promise<IDBDatabase>} */
function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

/**
 * Runs requests on the store and returns the first one's result when the transaction has been committed.
 * @template T
 * @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore) => IDBRequest<T> | undefined} use
 * @returns {Promise<T | undefined>}
 */
async function run(mode, use) {
  const transaction = (await open()).transaction(STORE, mode);
  const asked = use(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? asked?.error);
  });
}

/** @returns {Promise<Conversation[]>} all conversations that can be shown */
export async function loadAll() {
  const all = (await run("readonly", (store) => store.getAll())) ?? [];
  return all.map(checked).filter((one) => one !== null);
}

/**
 * @param {string} id
 * @returns {Promise<Conversation | null>}
 */
export async function load(id) {
  return checked(await run("readonly", (store) => store.get(id)));
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
  await run("readwrite", (store) => {
    for (const conversation of conversations) {
      const asked = store.get(conversation.id);
      asked.onsuccess = () => {
        const stored = checked(asked.result);
        if (stored && merge(conversation, stored)) changed.push(conversation);
        store.put(conversation);
      };
    }
    return undefined;
  });
  return changed;
}

/** @param {string} id */
export async function remove(id) {
  await run("readwrite", (store) => store.delete(id));
}
