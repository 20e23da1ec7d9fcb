/** Asks for the API key, once for all requests that need it. */

import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";

/** @type {Promise<boolean> | null} */
let asking = null;
let refused = false;

/**
 * Asks the user for the API key. After the user has closed the dialog without a key, it stays closed until
 * `askAgain`, because the page sends requests of its own all the time.
 * @returns {Promise<boolean>} whether the user has entered a key
 */
export function askForKey() {
  if (refused) return Promise.resolve(false);
  asking ??= ask().finally(() => (asking = null));
  return asking;
}

/** Lets the next refused request open the dialog again. */
export function askAgain() {
  refused = false;
}

async function ask() {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  const field = /** @type {HTMLInputElement} */ (byId("key"));
  byId("key-wrong").hidden = !apiKey();
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  refused = dialog.returnValue !== "entered";
  if (!refused) setApiKey(field.value.trim(), /** @type {HTMLInputElement} */ (byId("key-remember")).checked);
  field.value = "";
  return !refused;
}
