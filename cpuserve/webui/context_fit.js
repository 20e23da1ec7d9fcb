/** Which messages of a conversation fit into the context of its model. The server counts their tokens. */

import { json } from "./api.js";
import { addMessage, apiMessages, branch } from "./conversation.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {{model: string, length: number, tools: unknown}} Limits length: the tokens of the context
 */

// A prompt that may be so full is counted before it is sent; shorter ones cannot be too long.
const SURE = 0.6;
// The tokens that a response needs at least, as a share of the context and as a number.
const RESPONSE_SHARE = 32;
const RESPONSE_TOKENS = 256;
// No script has more tokens than this for a character, in most tokenizers.
const TOKENS_A_CHARACTER = 1;

/**
 * Returns a copy of a conversation that ends with one more message of the user.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Partial<Message>} values
 */
export function withMessage(conversation, parent, values) {
  const { messages, stamps, options } = conversation;
  const copy = { ...conversation, messages: { ...messages }, stamps: { ...stamps }, options: { ...options } };
  addMessage(copy, parent, { ...values, role: "user" });
  return copy;
}

/**
 * Returns whether a conversation is surely short enough.
 * @param {Conversation} conversation
 * @param {Limits} limits
 */
export function surelyFits(conversation, { length }) {
  const all = branch(conversation);
  const at = all.findLastIndex((message) => message.figures?.context);
  const known = all[at]?.figures?.context ?? 0;
  const sizes = all.slice(at + 1).map(({ text, files, seen = [], documents = [] }) => {
    const texts = [text, ...files.map((file) => file.text)];
    const tokens = [...seen, ...documents].map((each) => each.tokens ?? length);
    return texts.reduce((sum, each) => sum + TOKENS_A_CHARACTER * each.length, 0) + tokens.reduce((sum, n) => sum + n, 0);
  });
  return known + sizes.reduce((sum, size) => sum + size, 0) < SURE * length;
}

/**
 * Returns the tokens of a conversation; 0 if the server does not say.
 * @param {Conversation} conversation
 * @param {Limits} limits
 * @returns {Promise<number>}
 */
export async function countTokens(conversation, { model, tools }) {
  try {
    const messages = apiMessages(conversation, conversation.head);
    return (await json("tokenize", { json: { model, messages, tools } })).count;
  } catch {
    return 0; // the request itself says what is wrong
  }
}

/**
 * Returns how many tokens a prompt may have.
 * @param {number} length
 */
export const mostTokens = (length) => length - Math.min(RESPONSE_TOKENS, Math.floor(length / RESPONSE_SHARE));

/**
 * Returns the first message that can be sent with all messages after it, and the number of those before it;
 * null if the last question alone is too long.
 * @param {Conversation} conversation
 * @param {Limits} limits
 * @param {number} most
 * @returns {Promise<{id: string, left: number} | null>}
 */
export async function firstThatFits(conversation, limits, most) {
  const all = branch(conversation);
  const begin = all.findIndex(({ id }) => id === conversation.options.from);
  const places = all.map((message, i) => ({ id: message.id, left: i, message }));
  const starts = places.filter(({ message, left }) => message.role === "user" && left > begin);
  let low = 0;
  let high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    const trial = { ...conversation, options: { ...conversation.options, from: starts[middle].id } };
    if ((await countTokens(trial, limits)) <= most) high = middle;
    else low = middle + 1;
  }
  return starts[low] ?? null;
}
