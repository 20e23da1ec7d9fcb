/** Texts that the user has not sent yet, by conversation. They survive a reload of the page. */

import { local, session } from "./storage.js";

const KEY = "cpuserve.drafts";

/**
 * @param {string} id
 * @returns {string}
 */
export function draftOf(id) {
  return read(session)[id] ?? read(local)[id] ?? "";
}

/**
 * Keeps a text; an empty one is forgotten. This tab's own text is preferred to that of another tab.
 * @param {string} id
 * @param {string} text
 */
export function keepDraft(id, text) {
  for (const place of [session, local]) {
    const { [id]: before, ...drafts } = read(place);
    if (text) drafts[id] = text;
    if (text || before) place.set(KEY, JSON.stringify(drafts));
  }
}

/**
 * @param {import("./storage.js").Storage} place
 * @returns {Record<string, string>}
 */
function read(place) {
  try {
    return JSON.parse(place.get(KEY) ?? "{}") ?? {};
  } catch {
    return {};
  }
}
