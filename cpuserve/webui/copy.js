/** Copies a text, also where the page is served over http to another machine. */

import { notify } from "./notice.js";

/**
 * Puts a text on the clipboard, and says so if the browser refuses.
 *
 * Browsers offer `navigator.clipboard` only to pages of https and of this machine; elsewhere, the text of a
 * field that is selected can be copied.
 * @param {string} text
 * @returns {Promise<boolean>} whether the text is on the clipboard
 */
export async function copyText(text) {
  const done = (await written(text)) || selectedAndCopied(text);
  if (!done) notify("The browser does not let this page copy: select the text and copy it with the keyboard.");
  return done;
}

/** @param {string} text */
async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** @param {string} text */
function selectedAndCopied(text) {
  const field = document.createElement("textarea");
  const focus = document.activeElement;
  field.value = text;
  field.className = "hidden";
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    if (focus instanceof HTMLElement) focus.focus();
  }
}
