/** Says before a message is sent that it does not fit into the context, and offers what can be done. */

import { countTokens, firstThatFits, mostTokens, surelyFits, withMessage } from "./context_fit.js";
import { byId, h } from "./dom.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./context_fit.js").Limits} Limits
 * @typedef {import("./attachments.js").Attached} Attached
 */

/**
 * Returns whether a message of the user may be sent. If it is too long, the user chooses: `leaveOut` is called with
 * the first message that is sent, or nothing is sent.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {string} text
 * @param {Attached} attached
 * @param {Limits} limits
 * @param {(from: string) => void} leaveOut
 * @returns {Promise<boolean>}
 */
export async function mayBeSent(conversation, parent, text, attached, limits, leaveOut) {
  const { images, documents, files } = attached;
  const pictures = { images: images.map(({ url }) => url), seen: images.map(({ seen }) => seen) };
  const trial = withMessage(conversation, parent, { text, ...pictures, documents, files });
  if (!limits.length || surelyFits(trial, limits)) return true;
  const count = await countTokens(trial, limits);
  const most = mostTokens(limits.length);
  if (count <= most) return true;
  const first = await firstThatFits(trial, limits, most);
  const choice = await ask(told(count, limits.length), largest(attached), first?.left ?? 0);
  if (choice === "shorten" && first) leaveOut(first.id);
  return choice !== "";
}

/**
 * @param {number} count
 * @param {number} length
 */
function told(count, length) {
  const numbers = [count, length].map((number) => number.toLocaleString("en"));
  return `With the conversation, this message has ${numbers[0]} tokens. The context of the model has ${numbers[1]}, with the response.`;
}

/**
 * Returns a text about the largest file; "" if there is none.
 * @param {Attached} attached
 */
function largest({ images, documents, files }) {
  const sizes = [
    ...images.map(({ seen }, i) => ({ name: `Picture ${i + 1}`, tokens: seen.tokens ?? 0, way: "scale it down" })),
    ...documents.map(({ name, tokens = 0, pages }) => ({
      name: pages ? `${name} (${pages} pages)` : name,
      tokens,
      way: "attach fewer pages",
    })),
    ...files.map(({ name, text }) => ({ name, tokens: Math.round(text.length / 4), way: "attach a part of it" })),
  ];
  const [most] = sizes.sort((a, b) => b.tokens - a.tokens);
  return most?.tokens ? `${most.name} has about ${most.tokens.toLocaleString("en")} tokens: ${most.way}.` : "";
}

/**
 * Asks the user, and returns "shorten", "anyway", or "" for neither.
 * @param {string} text
 * @param {string} hint
 * @param {number} left how many messages can be left out; 0 = that does not help
 * @returns {Promise<string>}
 */
function ask(text, hint, left) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("fit-dialog"));
  const button = (/** @type {string} */ value, /** @type {string} */ label, main = false) =>
    h("button", { value, class: main ? "primary" : null }, label);
  const messages = left === 1 ? "message" : `${left} messages`;
  dialog.replaceChildren(
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "fit-title" }, "This message does not fit"),
      h("p", {}, text),
      hint && h("p", {}, hint),
      !left && h("p", {}, "The message alone is too long: shorten it, or choose a model with a longer context."),
      left > 0 && button("shorten", `Leave out the oldest ${messages}`, true),
      button("", "Change the message", !left),
      button("anyway", "Send it anyway"),
    ),
  );
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
