/** Stores conversations in this browser (IndexedDB), and exports and imports them as JSON files. */

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
 * Runs one request on the store and returns its result when the transaction has been committed.
 * @template T
 * @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore) => IDBRequest<T>} use
 * @returns {Promise<T>}
 */
async function run(mode, use) {
  const transaction = (await open()).transaction(STORE, mode);
  const asked = use(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? asked.error);
  });
}

/** @returns {Promise<Conversation[]>} all conversations, the newest first */
export async function loadAll() {
  const all = /** @type {Conversation[]} */ (await run("readonly", (store) => store.getAll()));
  return all.sort((a, b) => b.updated - a.updated);
}

/** @param {Conversation} conversation */
export async function save(conversation) {
  await run("readwrite", (store) => store.put(conversation));
}

/** @param {string} id */
export async function remove(id) {
  await run("readwrite", (store) => store.delete(id));
}

/**
 * Returns the text of an export file.
 * @param {Conversation[]} conversations
 */
export function exported(conversations) {
  return JSON.stringify({ format: "cpuserve-conversations", version: 1, conversations }, null, 1);
}

/**
 * Returns the conversations of an export file.
 * @param {string} text
 * @returns {Conversation[]}
 */
export function imported(text) {
  const wrong = new Error("This file is no export of conversations: choose one that this page wrote.");
  /** @type {any} */
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw wrong;
  }
  if (file?.format !== "cpuserve-conversations" || !Array.isArray(file.conversations)) throw wrong;
  if (!file.conversations.every(isConversation)) throw wrong;
  return file.conversations;
}

/** @param {any} value */
function isConversation(value) {
  if (typeof value?.id !== "string" || typeof value.messages !== "object") return false;
  if (typeof value.system !== "string" || typeof value.updated !== "number") return false;
  const known = (/** @type {unknown} */ id) => id === null || Object.hasOwn(value.messages, String(id));
  const messages = Object.entries(value.messages ?? {});
  /** @type {Set<unknown>} */
  const seen = new Set([null]);
  return known(value.head) && messages.every(([id, message]) => isMessage(id, message, seen));
}

/**
 * Checks a message, and that its parent comes before it, because a cycle of parents would never end.
 * @param {string} id
 * @param {any} message
 * @param {Set<unknown>} seen
 */
function isMessage(id, message, seen) {
  const texts = [message?.id, message?.text, message?.thought].every((t) => typeof t === "string");
  const lists = [message?.images, message?.files, message?.calls].every(Array.isArray);
  const role = ["user", "assistant", "tool"].includes(message?.role);
  const local = lists && message.images.every((/** @type {unknown} */ url) => isPicture(url));
  const valid = texts && local && role && message.id === id && seen.has(message.parent);
  seen.add(id);
  return valid;
}

/** @param {unknown} url */
const isPicture = (url) => typeof url === "string" && url.startsWith("data:image/");
