/**
 * What the user has not sent yet: messages, by conversation, and edits of messages. It survives a reload.
 *
 * Texts are in the storage that can be written while a page closes. Their files are records of a database.
 * No record is changed: another tab may show it. Records without a draft are removed after a week.
 */

import { newId } from "./conversation.js";
import { Store } from "./database.js";
import { local, session } from "./storage.js";

/**
 * @typedef {import("./attachments.js").Attached} Attached
 * @typedef {object} Draft
 * @property {string} text
 * @property {string} [files] the record of the files
 * @property {boolean} [open] of an edit: whether its form is shown
 */

const KEY = "cpuserve.drafts";
const WEEK_MS = 7 * 86_400_000;
const store = new Store("cpuserve-drafts", "files");

/**
 * @param {string} id
 * @returns {Draft | null}
 */
export function draftOf(id) {
  return read(session)[id] ?? read(local)[id] ?? null;
}

/**
 * Keeps a draft; one without content is forgotten. This tab's own draft is preferred to that of another tab.
 * @param {string} id
 * @param {Draft | null} draft
 */
export function keepDraft(id, draft) {
  const isEmpty = !draft || (!draft.text && !draft.files && draft.open === undefined);
  for (const place of [session, local]) {
    const { [id]: before, ...drafts } = read(place);
    if (!isEmpty) drafts[id] = draft;
    if (before || !isEmpty) place.set(KEY, JSON.stringify(drafts));
  }
}

/**
 * Forgets a draft, unless it has changed.
 * @param {string} id
 * @param {Draft | null} draft
 */
export function forgetDraft(id, draft) {
  if (JSON.stringify(draftOf(id)) !== JSON.stringify(draft)) return;
  keepDraft(id, null);
  if (draft?.files) forgetFiles(draft.files);
}

/**
 * @param {Attached} attached
 * @returns {Promise<string | undefined>} the new record; undefined if this browser keeps none
 */
export async function keepFiles({ images, documents, files }) {
  const record = { id: `${Date.now()}-${newId()}`, images, documents, files };
  try {
    await store.run("readwrite", (all) => all.put(record));
    return record.id;
  } catch {
    return undefined;
  }
}

/** @param {string} record */
export function forgetFiles(record) {
  store.run("readwrite", (all) => all.delete(record)).catch(() => {});
}

/**
 * @param {string | undefined} record
 * @returns {Promise<Attached | null>} null if there is no such record
 */
export async function filesOf(record) {
  if (!record) return null;
  return (await store.run("readonly", (all) => all.get(record)).catch(() => null)) ?? null;
}

/**
 * Forgets the drafts of what is gone, and old records of files.
 * @param {(id: string) => boolean} isKnown whether a draft may still be shown
 */
export async function tidyDrafts(isKnown) {
  const named = new Set();
  for (const place of [session, local]) {
    const drafts = Object.entries(read(place)).filter(([id]) => isKnown(id));
    for (const [, draft] of drafts) named.add(draft.files);
    place.set(KEY, JSON.stringify(Object.fromEntries(drafts)));
  }
  const records = (await store.run("readonly", (all) => all.getAllKeys()).catch(() => [])) ?? [];
  const before = Date.now() - WEEK_MS;
  for (const id of records.map(String)) if (Number.parseInt(id, 10) < before && !named.has(id)) forgetFiles(id);
}

/**
 * @param {import("./storage.js").Storage} place
 * @returns {Record<string, Draft>}
 */
function read(place) {
  try {
    /** @type {[string, Draft | string][]} */
    const drafts = Object.entries(JSON.parse(place.get(KEY) ?? "{}") ?? {});
    // Earlier versions of the page kept texts only.
    return Object.fromEntries(drafts.map(([id, draft]) => [id, typeof draft === "string" ? { text: draft } : draft]));
  } catch {
    return {};
  }
}
