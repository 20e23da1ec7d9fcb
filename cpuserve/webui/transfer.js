/** Conversations as files: JSON that this page can import again, and Markdown for people. */

import { branch } from "./conversation.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 */

const FORMAT = "cpuserve-conversations";

/**
 * Returns the text of an export file.
 * @param {Conversation[]} conversations
 */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * Returns the conversations of an export file, and how many of them are damaged and left out.
 * @param {string} text
 * @returns {{conversations: Conversation[], damaged: number}}
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
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw wrong;
  const conversations = file.conversations.map(checked).filter((/** @type {unknown} */ one) => one !== null);
  const damaged = file.conversations.length - conversations.length;
  if (damaged && !conversations.length) throw wrong;
  return { conversations, damaged };
}

/** @typedef {(value: any) => boolean} Test */

/** @type {Test} */
const isText = (value) => typeof value === "string";
/** @type {Test} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
/** @type {Test} ms since 1970, as dates can show them */
const isTime = (value) => typeof value === "number" && !Number.isNaN(new Date(value).getTime());
/** @type {Test} */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
/** @type {(each: Test) => Test} */
const list = (each) => (value) => Array.isArray(value) && value.every(each);
/** @type {(each: Test) => Test} */
const table = (each) => (value) => isObject(value) && Object.values(value).every(each);
/** @type {(...known: unknown[]) => Test} */
const oneOf = (...known) => (value) => known.includes(value);
/** @type {(tests: Record<string, Test>) => Test} */
const shape = (tests) => (value) => isObject(value) && Object.entries(tests).every(([name, test]) => test(value[name]));
/** @type {(test: Test) => Test} */
const maybe = (test) => (value) => value === undefined || test(value);
/** @type {Test} ids become keys of objects and parts of element ids */
const isId = (value) => isText(value) && /^[A-Za-z0-9][\w-]{0,63}$/.test(value) && !(value in {});
/** @type {(kind: string) => Test} */
const dataOf = (kind) => (value) => isText(value) && value.startsWith(`data:${kind}`);
/** @type {Test} */
const isDocument = (value) => dataOf("application/pdf")(value) || dataOf("application/vnd.openxmlformats-")(value);

const isMessage = shape({
  id: isId,
  role: oneOf("user", "assistant", "tool"),
  state: maybe(oneOf("streaming", "stopped", "failed", "done")),
  text: isText,
  images: list(dataOf("image/")),
  seen: maybe(list(table(isNumber))),
  documents: maybe(
    list(shape({ name: isText, url: isDocument, pages: maybe(isNumber), tokens: maybe(isNumber) })),
  ),
  files: list(shape({ name: isText, text: isText })),
  thought: isText,
  calls: list(shape({ id: isText, function: shape({ name: isText, arguments: isText }) })),
  results: maybe(table(isText)),
  callId: maybe(isText),
  name: maybe(isText),
  model: maybe(isText),
  error: maybe(isText),
  finish: maybe(isText),
  edited: maybe((value) => typeof value === "boolean"),
  figures: maybe(table(isNumber)),
  created: isTime,
  changed: maybe(isTime),
});

const isConversation = shape({
  id: isId,
  title: isText,
  pinned: maybe((value) => typeof value === "boolean"),
  updated: isTime,
  system: isText,
  options: maybe(table(isText)),
  messages: table(isMessage),
  stamps: maybe(table(isTime)),
  removed: maybe(table(isTime)),
});

/**
 * Returns a conversation of a file or of the store with all fields that the page uses; null if it has
 * wrong types, or parents that form a circle. Earlier versions of the page wrote fewer fields.
 * @param {any} value
 * @returns {Conversation | null}
 */
export function checked(value) {
  if (!isConversation(value)) return null;
  const seen = new Set([null]);
  for (const [id, message] of Object.entries(value.messages)) {
    if (message.id !== id || !seen.has(message.parent)) return null;
    seen.add(message.id);
    message.state ??= stateOf(message);
    message.changed ??= message.created;
  }
  if (!seen.has(value.head ?? null)) return null;
  return { ...value, head: value.head ?? null, ...optional(value) };
}

/** @param {any} value */
function optional({ pinned = false, options = {}, stamps = {}, removed = {} }) {
  return { pinned, options, stamps, removed };
}

/** @param {Message} message */
function stateOf(message) {
  if (message.role !== "assistant" || message.finish) return "done";
  return message.error ? "failed" : "stopped";
}

/**
 * Returns the selected branch as Markdown.
 * @param {Conversation} conversation
 */
export function asMarkdown(conversation) {
  const date = new Date(conversation.updated).toLocaleString();
  const system = conversation.system.trim();
  const head = [`# ${conversation.title || "Conversation"}`, date];
  if (system) head.push("## System prompt", system);
  return `${[...head, ...branch(conversation).flatMap(messageLines)].join("\n\n")}\n`;
}

/** @param {Message} message */
function messageLines(message) {
  const name = { user: "You", assistant: message.model ?? "Model", tool: `${message.name ?? "tool"} returned` };
  const pictures = message.images.length ? [`*${message.images.length} attached picture(s)*`] : [];
  const documents = (message.documents ?? []).map((each) => `*${each.name}, attached*`);
  const files = message.files.map((file) => `**${file.name}**\n\n${fenced(file.text)}`);
  const thought = message.thought ? [quoted(message.thought)] : [];
  const calls = message.calls.map((call) => `**${call.function.name}**\n\n${fenced(call.function.arguments, "json")}`);
  const text = message.role === "tool" ? fenced(message.text) : message.text;
  return [`## ${name[message.role]}`, ...pictures, ...documents, ...files, ...thought, text, ...calls].filter(Boolean);
}

/** @param {string} text */
const quoted = (text) => text.trim().replace(/^/gm, "> ");

/**
 * Returns a code block whose fence is longer than each one in the text.
 * @param {string} text
 */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/**
 * Returns a title as the name of a file.
 * @param {string} title
 */
export function fileName(title) {
  const words = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return words.slice(0, 60) || "conversation";
}
