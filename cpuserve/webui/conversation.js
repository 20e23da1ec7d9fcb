/**
 * A conversation is a tree of messages. Editing a message or repeating a response adds a sibling
 * branch, and `head` is the last message of the selected branch.
 */

/**
 * @typedef {{type: "text", text: string} | {type: "image_url", image_url: {url: string}}} Part
 * @typedef {{id: string, type: "function", function: {name: string, arguments: string}}} ToolCall
 * @typedef {{name: string, text: string}} TextFile
 * @typedef {{prompt: number, cached: number, tokens: number, seconds: number, first: number}} Figures
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} text
 * @property {string[]} images data URLs
 * @property {TextFile[]} files
 * @property {string} thought
 * @property {ToolCall[]} calls
 * @property {string} [callId] the call that a tool's result belongs to
 * @property {string} [name] the tool of a result
 * @property {string} [model]
 * @property {string} [error] why the response ended before it was complete
 * @property {string} [finish]
 * @property {Figures} [figures]
 * @property {number} created ms since 1970
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated ms since 1970
 * @property {string} system
 * @property {Record<string, Message>} messages
 * @property {string | null} head
 */

/** @returns {string} an id that no other message or conversation has */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @param {string} [system]
 * @returns {Conversation}
 */
export function newConversation(system = "") {
  return { id: newId(), title: "", updated: Date.now(), system, messages: {}, head: null };
}

/**
 * Adds a message after `parent`, makes it the head, and returns it.
 * @param {Conversation} conversation
 * @param {string | null} parent
 * @param {Partial<Message> & {role: Message["role"]}} values
 * @returns {Message}
 */
export function addMessage(conversation, parent, values) {
  const message = {
    text: "",
    images: [],
    files: [],
    thought: "",
    calls: [],
    created: Date.now(),
    ...values,
    id: newId(),
    parent,
  };
  conversation.messages[message.id] = message;
  conversation.head = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message);
  return message;
}

/** @param {Message} message */
function titleOf(message) {
  const line = message.text.trim().split("\n")[0];
  return (line || message.files[0]?.name || "Picture").slice(0, 80);
}

/**
 * Returns the messages of the selected branch, from the first to the last.
 * @param {Conversation} conversation
 * @returns {Message[]}
 */
export function branch(conversation, head = conversation.head) {
  /** @type {Message[]} */
  const path = [];
  for (let id = head; id; id = conversation.messages[id].parent) {
    path.unshift(conversation.messages[id]);
  }
  return path;
}

/**
 * Returns the messages with the same parent, in order of creation.
 * @param {Conversation} conversation
 * @param {Message} message
 * @returns {Message[]}
 */
export function siblings(conversation, message) {
  const all = Object.values(conversation.messages);
  return all.filter((other) => other.parent === message.parent);
}

/**
 * Selects the newest branch that contains `message`.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function selectBranch(conversation, message) {
  let last = message;
  for (;;) {
    const children = Object.values(conversation.messages).filter((m) => m.parent === last.id);
    const newest = children.at(-1);
    if (!newest) break;
    last = newest;
  }
  conversation.head = last.id;
}

/**
 * Removes a message and all messages after it, and selects the branch that ends before it.
 * @param {Conversation} conversation
 * @param {Message} message
 */
export function removeMessage(conversation, message) {
  const gone = new Set([message.id]);
  // Children are created after their parents, so one pass in order of creation finds all of them.
  for (const other of Object.values(conversation.messages)) {
    if (other.parent && gone.has(other.parent)) gone.add(other.id);
  }
  const others = siblings(conversation, message).filter((other) => other !== message);
  for (const id of gone) delete conversation.messages[id];
  if (conversation.head && gone.has(conversation.head)) {
    conversation.head = message.parent;
    const next = others.at(-1);
    if (next) selectBranch(conversation, next);
  }
}

/**
 * Returns the messages of a branch in the format of the API.
 * @param {Conversation} conversation
 * @param {string | null} head
 * @returns {object[]}
 */
export function apiMessages(conversation, head) {
  const system = conversation.system.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...branch(conversation, head).map(apiMessage)];
}

/** @param {Message} message */
function apiMessage(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.callId, content: message.text };
  }
  if (message.role === "assistant") {
    const calls = message.calls.length ? { tool_calls: message.calls } : {};
    const thought = message.thought ? { reasoning: message.thought } : {};
    return { role: "assistant", content: message.text, ...thought, ...calls };
  }
  const files = message.files.map((file) => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`);
  const text = files.join("") + message.text;
  if (!message.images.length) return { role: "user", content: text };
  /** @type {Part[]} */
  const parts = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text }] };
}
