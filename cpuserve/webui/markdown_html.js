/**
 * The few tags and the entities of HTML that models write in Markdown. Tags have no attributes here, and become
 * elements by their name; no text is parsed as HTML, except for one entity.
 */

import { h } from "./dom.js";

const DETAILS = /^ {0,3}<details(\s+open)?\s*>/i;
const TAG = /^<(sub|sup|kbd|b|strong|i|em|u|s|del|ins|mark|small)>/i;
const ENTITY = /^&(?:#\d{1,7}|#x[0-9a-f]{1,6}|[a-z][a-z0-9]{1,31});/i;

/** @param {string} line */
export const isDetails = (line) => DETAILS.test(line);

/**
 * Returns the number of the line after the details that begin at line `begin`.
 * @param {string[]} lines
 * @param {number} begin
 */
export function endOfDetails(lines, begin) {
  let open = 0;
  for (let at = begin; at < lines.length; at += 1) {
    open += (lines[at].match(/<details[\s>]/gi) ?? []).length;
    open -= (lines[at].match(/<\/details>/gi) ?? []).length;
    if (open <= 0) return at + 1;
  }
  return lines.length;
}

/**
 * Returns the summary and the text of details.
 * @param {string} source
 */
export function partsOfDetails(source) {
  const head = DETAILS.exec(source);
  let text = source.slice(head?.[0].length ?? 0);
  const end = text.toLowerCase().lastIndexOf("</details>");
  if (end >= 0) text = text.slice(0, end);
  const summary = /^\s*<summary>([\s\S]*?)<\/summary>/i.exec(text);
  return { summary: summary?.[1].trim() ?? "", text: text.slice(summary?.[0].length ?? 0), open: Boolean(head?.[1]) };
}

/**
 * Returns the element of a tag and its end; null if it is none, or is not closed.
 * @param {string} text
 * @param {number} at
 * @param {(inner: string) => (Node | string)[]} inline
 */
export function tagged(text, at, inline) {
  const tag = TAG.exec(text.slice(at, at + 10))?.[1];
  if (!tag) return null;
  const begin = at + tag.length + 2;
  const closing = `</${tag}>`;
  const end = text.indexOf(closing, begin);
  if (end < 0) return null;
  return { node: h(tag.toLowerCase(), {}, ...inline(text.slice(begin, end))), end: end + closing.length };
}

/**
 * Returns the character of an entity and its end; null if it is none.
 * @param {string} text
 * @param {number} at
 */
export function entity(text, at) {
  const name = ENTITY.exec(text.slice(at, at + 40))?.[0];
  if (!name) return null;
  // The browser knows all 2,000 names. A document that is not shown runs nothing, and has this entity only.
  const node = new DOMParser().parseFromString(name, "text/html").body.textContent ?? "";
  return node === name ? null : { node, end: at + name.length };
}
