/**
 * A conversation is a tree of messages. Editing a message or repeating a response adds a sibling
 * branch, and `head` is the last message of the selected branch.
 *
 * Several tabs may change the same conversation. So each message has the time of its last change, each
 * field of the conversation too (`stamps`), and `removed` has the messages that are gone: `merge` takes
 * the newer version of each.
 */

import { documentPart, imagePart } from "./attachments.js";

/**
 * @typedef {{type: "text", text: string} | {type: "image_url", image_url: {url: string}}
 *   | {type: "file", file: {filename: string, file_data: string}}} Part
 * @typedef {{id: string, type: "function", function: {name: string, arguments: string}}} ToolCall
 * @typedef {{name: string, text: string}} TextFile
 * @typedef {{width: number, height: number, used_width?: number, used_height?: number, tokens?: number}} Seen
 *   the size of a picture in pixels, the size at which the model sees it, and its tokens in the prompt
 * @typedef {{name: string, url: string, pages?: number, tokens?: number}} DocumentFile url: a data URL; pages: if the
 *   model sees pictures of them
 * @typedef {{prompt: number, cached: number, tokens: number, seconds: number, first: number,
 *   context?: number, pictures?: number}} Figures context: the tokens of the prompt and the response of the
 *   last request; pictures: the tokens of the prompt that pictures have
 * @typedef {"streaming" | "stopped" | "failed" | "done"} State
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {State} state
 * @property {string} text
 * @property {string[]} images data URLs
 * @property {Partial<Seen>[]} [seen] the sizes of `images`; earlier versions of the page did not keep them
 * @property {DocumentFile[]} [documents]
 * @property {TextFile[]} files
 * @property {string} thought
 * @property {ToolCall[]} calls
 * @property {Record<string, string>} [results] what the user has entered, by call, until all calls have a result
 * @property {string} [callId] the call that a tool's result belongs to
 * @property {string} [name] the tool of a result
 * @property {string} [model]
 * @property {string} [error] why the response failed
 * @property {string} [finish]
 * @property {boolean} [edited] whether the user has changed a response
 * @property {Figures} [figures]
 * @property {number} created ms since 1970
 * @property {number} changed ms since 1970
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {boolean} pinned
 * @property {number} updated ms since 1970, of the newest message
 * @property {string} system
 * @property {Record<string, string>} options the model and the sampling fields of this conversation
 * @property {Record<string, Message>} messages
 * @property {string | null} head
 * @property {Record<string, number>} stamps when a field was changed, in ms since 1970
 * @property {Record<string, number>} removed when a message was removed, in ms since 1970
 */

const LONGEST_TITLE = 120;
const OPTION = "option "; // the stamp of an option has this before its name

/** @returns {string} an id that no other message or conversation has */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @param {string} [system]
 * @param {Record<string, string>} [options]
 * @returns {Conversation}
 */
export function newConversation(system = "", options = {}) {
  const empty = { title: "", pinned: false, head: null, messages: {}, stamps: {}, removed: {} };
  return { ...empty, id: newId(), updated: Date.now(), system, options: { ...options } };
}

/**
 * Changes a field, so that the other tabs take it over.
 * @template {"title" | "pinned" | "system"} Name
 * @param {Conversation} conversation
 * @param {Name} name
 * @param {Conversation[Name]} value
 */
export function setField(conversation, name, value) {
  conversation[name] = value;
  conversation.stamps[name] = Date.now();
}

/**
 * Changes one of the options, so that the other tabs take it over.
 * @param {Conversation} conversation
 * @param {string} name
 * @param {string} value
 */
export function setOption(conversation, name, value) {
  conversation.options[name] = value;
  conversation.stamps[OPTION + name] = Date.now();
}

/**
 * Returns when an option was changed, in ms since 1970; 0 = never.
 * @param {Conversation} conversation
 * @param {string} name
 */
export const optionChanged = (conversation, name) => conversation.stamps[OPTION + name] ?? 0;

/**
 * Adds a message after `parent`, makes it the head, and returns it.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Partial<Message> & {role: Message["role"]}} values
 * @returns {Message}
 */
export function addMessage(conversation, parent, values) {
  const now = Date.now();
  /** @type {Message} */
  const message = {
    state: "done",
    text: "",
    images: [],
    files: [],
    thought: "",
    calls: [],
    created: now,
    ...values,
    changed: now,
    id: newId(),
    parent,
  };
  conversation.messages[message.id] = message;
  conversation.head = message.id;
  conversation.updated = now;
  if (!conversation.title && message.role === "user") setField(conversation, "title", titleOf(message));
  return message;
}

/** @param {Message} message */
function titleOf(message) {
  const line = message.text.trim().split("\n")[0];
  const file = message.documents?.[0] ?? message.files[0];
  return (line || file?.name || "Picture").slice(0, LONGEST_TITLE);
}

/**
 * @param {Message} message
 * @param {Partial<Message>} values
 */
export function change(message, values) {
  Object.assign(message, values, { changed: Date.now() });
}

/**
 * Returns the messages of the selected branch, from the first to the last.
 * @param {Conversation} conversation
 * @returns {Message[]}
 */
export function branch(conversation, head = conversation.head) {
  /** @type {Message[]} */
  const path = [];
  for (let id = head; id; id = conversation.messages[id].parent) path.push(conversation.messages[id]);
  return path.reverse();
}

/**
 * Returns the messages after each message (after null: the first ones), in order of creation.
 * @param {Conversation} conversation
 * @returns {Map<string | null, Message[]>}
 */
export function childrenOf(conversation) {
  /** @type {Map<string | null, Message[]>} */
  const children = new Map();
  for (const message of Object.values(conversation.messages)) {
    const known = children.get(message.parent);
    if (known) known.push(message);
    else children.set(message.parent, [message]);
  }
  for (const list of children.values()) list.sort((a, b) => a.created - b.created);
  return children;
}

/**
 * Selects the newest branch that contains `message`.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function selectBranch(conversation, message) {
  const children = childrenOf(conversation);
  let last = message;
  for (let next = message; next; next = /** @type {Message} */ (children.get(next.id)?.at(-1))) last = next;
  conversation.head = last.id;
}

/**
 * Removes a message and all messages after it, and selects the branch that ends before it.
 * @param {Conversation} conversation
 * @param {Message} message
 * @returns {Message[]} the messages that are gone, for `restore`
 */
export function removeMessage(conversation, message) {
  const children = childrenOf(conversation);
  const gone = [message];
  for (const each of gone) gone.push(...(children.get(each.id) ?? []));
  const now = Date.now();
  for (const { id } of gone) {
    conversation.removed[id] = now;
    delete conversation.messages[id];
  }
  if (gone.some(({ id }) => id === conversation.head)) {
    conversation.head = message.parent;
    const next = children.get(message.parent)?.filter((other) => other !== message).at(-1);
    if (next) selectBranch(conversation, next);
  }
  return gone;
}

/**
 * Puts back what `removeMessage` has removed, and selects `head`.
 * @param {Conversation} conversation
 * @param {Message[]} gone
 * @param {string | null} head
 */
export function restore(conversation, gone, head) {
  for (const message of gone) {
    // Later than its removal, which other tabs may already know.
    message.changed = Math.max(Date.now(), (conversation.removed[message.id] ?? 0) + 1);
    conversation.messages[message.id] = message;
    delete conversation.removed[message.id];
  }
  conversation.head = head;
}

const FIELDS = /** @type {const} */ (["title", "pinned", "system"]);

/**
 * Takes into `mine` what another tab, or a file, has newer. Messages keep their objects. The selected
 * branch stays, unless the other tab has continued it.
 * @param {Conversation} mine
 * @param {Conversation} theirs
 * @returns {boolean} whether `mine` has changed
 */
export function merge(mine, theirs) {
  let changed = false;
  for (const name of FIELDS) {
    if ((theirs.stamps[name] ?? 0) <= (mine.stamps[name] ?? 0)) continue;
    Object.assign(mine, { [name]: theirs[name] });
    mine.stamps[name] = theirs.stamps[name];
    changed = true;
  }
  changed = mergeOptions(mine, theirs) || changed;
  mine.updated = Math.max(mine.updated, theirs.updated);
  for (const [id, at] of Object.entries(theirs.removed)) {
    mine.removed[id] = Math.max(at, mine.removed[id] ?? 0);
  }
  for (const other of Object.values(theirs.messages)) changed = mergeMessage(mine, other) || changed;
  for (const message of Object.values(mine.messages)) {
    const orphan = message.parent !== null && !mine.messages[message.parent];
    if (!orphan && (mine.removed[message.id] ?? 0) < message.changed) continue;
    delete mine.messages[message.id];
    changed = true;
  }
  return mergeHead(mine, theirs) || changed;
}

/**
 * Takes each option from where it was changed later.
 * @param {Conversation} mine
 * @param {Conversation} theirs
 */
function mergeOptions(mine, theirs) {
  // Earlier versions of the page had one stamp for all options.
  const stamp = (/** @type {Conversation} */ one, /** @type {string} */ name) =>
    one.stamps[OPTION + name] ?? one.stamps.options ?? 0;
  let changed = false;
  for (const [name, value] of Object.entries(theirs.options)) {
    if (stamp(theirs, name) <= stamp(mine, name)) continue;
    mine.options[name] = value;
    mine.stamps[OPTION + name] = stamp(theirs, name);
    changed = true;
  }
  return changed;
}

/**
 * @param {Conversation} mine
 * @param {Conversation} theirs
 */
function mergeHead(mine, theirs) {
  const before = mine.head;
  const known = theirs.head !== null && theirs.head in mine.messages;
  if (before === null || !mine.messages[before]) {
    const first = childrenOf(mine).get(null)?.at(-1);
    mine.head = null;
    if (known) mine.head = theirs.head;
    else if (first) selectBranch(mine, first);
  } else if (known && branch(mine, theirs.head).some(({ id }) => id === before)) {
    mine.head = theirs.head;
  }
  return mine.head !== before;
}

/**
 * @param {Conversation} mine
 * @param {Message} other
 */
function mergeMessage(mine, other) {
  if ((mine.removed[other.id] ?? 0) >= other.changed) return false;
  const own = /** @type {any} */ (mine.messages[other.id]);
  if (own && own.changed >= other.changed) return false;
  if (!own) {
    mine.messages[other.id] = other;
    return true;
  }
  for (const name of Object.keys(own)) if (!(name in other)) delete own[name];
  Object.assign(own, other);
  return true;
}

/**
 * Returns whether the model will not see a message: a response that failed before its first token.
 * @param {Message} message
 */
export function isEmptyFailure(message) {
  return message.role === "assistant" && message.state === "failed" && !message.text && !message.calls.length;
}

/**
 * Returns the messages of a branch in the format of the API.
 *
 * A turn that failed without a text is left out, with its question: the question may be why it failed.
 * Calls without results are left out too, because no template can show them, and so are the messages before the
 * one that the option `from` names.
 * @param {Conversation} conversation
 * @param {string | null} head
 * @returns {object[]}
 */
export function apiMessages(conversation, head) {
  const system = conversation.system.trim();
  const whole = branch(conversation, head);
  const all = whole.slice(Math.max(0, whole.findIndex(({ id }) => id === conversation.options.from)));
  const kept = all.filter((message, i) => {
    const next = all[i + 1];
    if (message.role === "user") return !next || !isEmptyFailure(next);
    return message.role === "tool" || message.text || isAnswered(message, next) || i === all.length - 1;
  });
  const parts = kept.map((message, i) => apiMessage(message, isAnswered(message, kept[i + 1])));
  return [...(system ? [{ role: "system", content: system }] : []), ...joined(parts)];
}

/**
 * @param {Message} message
 * @param {Message | undefined} next
 */
const isAnswered = (message, next) => message.calls.length > 0 && next?.role === "tool";

/**
 * Joins texts of the user that follow each other (the response between them was stopped before its first
 * token), because many templates refuse two turns of the user in a row.
 * @param {any[]} messages
 */
function joined(messages) {
  /** @type {any[]} */
  const list = [];
  for (const message of messages) {
    const last = list.at(-1);
    if (last?.role === "user" && message.role === "user") last.content = bothContents(last.content, message.content);
    else list.push(message);
  }
  return list;
}

/**
 * @param {string | Part[]} first
 * @param {string | Part[]} second
 */
function bothContents(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  const parts = (/** @type {string | Part[]} */ content) =>
    typeof content === "string" ? [/** @type {Part} */ ({ type: "text", text: content })] : content;
  return [...parts(first), ...parts(second)];
}

/**
 * @param {Message} message
 * @param {boolean} withCalls
 */
function apiMessage(message, withCalls) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.callId, content: message.text };
  }
  if (message.role === "assistant") {
    const calls = withCalls ? { tool_calls: message.calls } : {};
    const thought = message.thought ? { reasoning: message.thought } : {};
    return { role: "assistant", content: message.text, ...thought, ...calls };
  }
  const files = message.files.map((file) => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`);
  const text = files.join("") + message.text;
  const parts = [...message.images.map(imagePart), ...(message.documents ?? []).map(documentPart)];
  if (!parts.length) return { role: "user", content: text };
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}
