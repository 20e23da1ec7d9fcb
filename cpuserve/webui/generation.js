/**
 * Generates responses: one at a time in each conversation, in as many conversations as the user likes, whether
 * they are shown or not. A response is stored while it streams.
 */

import { ServerError, stream } from "./api.js";
import { addMessage, apiMessages, change } from "./conversation.js";
import { runTool } from "./tools.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 *
 * How far the server is with a prompt, in tokens; `since` is the time when this page began to wait, in ms.
 * @typedef {{total: number, cache: number, processed: number, time_ms: number, tiles?: number, tiles_read?: number}}
 *   Progress tiles: those of all pictures
 * @typedef {{stop: AbortController, message: Message, progress: Progress | null}} Run
 */

// Limits how often a model may call tools in a row; the user can always continue.
const MAX_ROUNDS = 16;
/** The finish of a response to a prompt that was too long. */
export const CONTEXT = "context";
const SAVE_MS = 1000;
const CLOSING_MS = 3000;
// A long conversation takes longer to store; this keeps the share of the time that it takes below 1/20.
const SAVE_SHARE = 20;
const STREAM = {
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
  return_progress: true,
};

export class Generator {
  /**
   * @param {{
   *   model: (conversation: Conversation) => string,
   *   fields: (conversation: Conversation) => Record<string, unknown>,
   *   ownTools: () => Set<string>,
   *   keep: (conversation: Conversation) => Promise<unknown>,
   *   leave: (conversation: Conversation) => void,
   *   added: (conversation: Conversation) => void,
   *   grew: (conversation: Conversation, message: Message) => void,
   *   ended: (conversation: Conversation, message: Message, error?: unknown) => void,
   * }} page `fields`: further members of a request; `keep` stores; `leave` keeps at once, since
   *   the page may be closing; the others update what is shown
   */
  constructor(page) {
    this.page = page;
    /** @type {Map<string, Run>} by the id of the conversation */
    this.runs = new Map();
    /** When the page began to close, in ms: the browser then ends its requests, which is no failure. */
    this.closing = -Infinity;
  }

  /** @param {Conversation} conversation */
  run(conversation) {
    return this.runs.get(conversation.id);
  }

  /**
   * Returns whether this tab generates a message.
   * @param {string} id
   */
  streams(id) {
    return [...this.runs.values()].some((run) => run.message.id === id);
  }

  /**
   * Generates responses after `parent` until the model calls no tool, or a tool that the user has to run.
   * @param {Conversation} conversation
   * @param {string | null} parent
   */
  async respond(conversation, parent) {
    this.stop(conversation);
    let after = parent;
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      const head = conversation.head;
      const model = this.page.model(conversation);
      const message = addMessage(conversation, after, { role: "assistant", model, state: "streaming" });
      // In later rounds the user may look at another branch.
      if (round && head !== after) conversation.head = head;
      if (!(await this.generate(conversation, message, { messages: apiMessages(conversation, after) }))) return;
      after = message.calls.length ? this.answerCalls(conversation, message) : null;
      if (after === null) return;
    }
  }

  /**
   * Continues a response that was stopped, failed or reached its maximum number of tokens.
   * @param {Conversation} conversation
   * @param {Message} message
   */
  async resume(conversation, message) {
    this.stop(conversation);
    // A call that was cut off is written again.
    change(message, { state: "streaming", error: undefined, finish: undefined, calls: [] });
    const messages = apiMessages(conversation, message.id);
    await this.generate(conversation, message, {
      messages,
      continue_final_message: true,
      add_generation_prompt: false,
    });
  }

  /**
   * Adds a message with the result of each call; returns null if the user has to enter a result.
   * @param {Conversation} conversation
   * @param {Message} message
   * @returns {string | null} the id of the last result
   */
  answerCalls(conversation, message) {
    const texts = message.calls.map((call) => resultOf(message, call, this.page.ownTools()));
    if (texts.some((text) => text === null)) return null;
    const head = conversation.head;
    let parent = message.id;
    message.calls.forEach((call, i) => {
      const values = { text: /** @type {string} */ (texts[i]), callId: call.id, name: call.function.name };
      parent = addMessage(conversation, parent, { role: "tool", ...values }).id;
    });
    if (head !== message.id) conversation.head = head;
    this.page.added(conversation);
    this.page.keep(conversation);
    return parent;
  }

  /**
   * Streams one response into `message`.
   * @param {Conversation} conversation
   * @param {Message} message
   * @param {Record<string, unknown>} fields
   * @returns {Promise<boolean>} whether the response is complete
   */
  async generate(conversation, message, fields) {
    /** @type {Run} */
    const run = { stop: new AbortController(), message, progress: null };
    this.runs.set(conversation.id, run);
    const saver = new Saver(() => this.page.keep(conversation));
    this.page.added(conversation);
    saver.save();
    const reader = new ResponseReader(message);
    /** @type {unknown} */
    let failure;
    try {
      const model = this.page.model(conversation);
      const body = { ...this.page.fields(conversation), ...fields, ...STREAM, ...(model ? { model } : {}) };
      for await (const chunk of stream("v1/chat/completions", body, run.stop.signal)) {
        reader.read(chunk);
        run.progress = chunk.prompt_progress ?? (reader.first ? null : run.progress);
        this.page.grew(conversation, message);
        saver.saveSometimes();
      }
      if (!run.stop.signal.aborted) change(message, { state: "done" });
    } catch (error) {
      failure = error;
      const closes = performance.now() - this.closing < CLOSING_MS;
      if (closes) change(message, { state: "stopped" });
      else if (!run.stop.signal.aborted) {
        const full = error instanceof ServerError && error.code === "context_length_exceeded";
        change(message, { state: "failed", error: reasonOf(error), finish: full ? CONTEXT : undefined });
      }
    }
    this.page.leave(conversation);
    if (this.runs.get(conversation.id) === run) this.runs.delete(conversation.id);
    this.page.ended(conversation, message, message.state === "failed" ? failure : undefined);
    await saver.save();
    return message.state === "done";
  }

  /**
   * Stops the response of a conversation; its text stays.
   * @param {Conversation} conversation
   */
  stop(conversation) {
    const run = this.run(conversation);
    if (!run) return;
    this.runs.delete(conversation.id);
    change(run.message, { state: "stopped" });
    run.stop.abort();
  }
}

/** Stores a conversation while a response streams: not more often than storing it permits. */
class Saver {
  /** @param {() => Promise<unknown>} save */
  constructor(save) {
    this.store = save;
    this.next = 0;
    this.saving = false;
  }

  async save() {
    const begun = performance.now();
    this.saving = true;
    await this.store();
    this.saving = false;
    const ended = performance.now();
    this.next = ended + Math.max(SAVE_MS, SAVE_SHARE * (ended - begun));
  }

  saveSometimes() {
    if (!this.saving && performance.now() >= this.next) this.save();
  }
}

/**
 * Returns the result of a call: what the user has entered, or what a built-in tool returns; null if neither.
 * @param {Message} message
 * @param {import("./conversation.js").ToolCall} call
 * @param {Set<string>} own the names of the user's tools
 */
export function resultOf(message, call, own) {
  const { name, arguments: given } = call.function;
  return message.results?.[call.id] ?? (own.has(name) ? null : runTool(name, given));
}

/** Adds the chunks of a stream to a message. */
class ResponseReader {
  /** @param {Message} message */
  constructor(message) {
    this.message = message;
    this.sent = performance.now();
    this.first = 0;
    const before = message.figures;
    this.before = { tokens: before?.tokens ?? 0, seconds: before?.seconds ?? 0 };
  }

  /** @param {any} chunk */
  read(chunk) {
    const { message } = this;
    const now = performance.now();
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    if (!this.first && (delta.content || thought || delta.tool_calls)) this.first = now;
    message.text += delta.content ?? "";
    message.thought += thought;
    for (const call of delta.tool_calls ?? []) addCall(message.calls, call);
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    message.changed = Date.now();
    if (!chunk.usage || !this.first) return;
    message.figures = {
      prompt: chunk.usage.prompt_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      tokens: this.before.tokens + chunk.usage.completion_tokens,
      seconds: this.before.seconds + (now - this.first) / 1000,
      first: (this.first - this.sent) / 1000,
      context: chunk.usage.prompt_tokens + chunk.usage.completion_tokens,
      pictures: chunk.usage.prompt_tokens_details?.multimodal_tokens?.image ?? 0,
    };
  }
}

/**
 * @param {Message["calls"]} calls
 * @param {any} part
 */
function addCall(calls, part) {
  calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = calls[part.index];
  call.id ||= part.id ?? "";
  call.function.name ||= part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
}

/** @param {unknown} error */
function reasonOf(error) {
  if (error instanceof ServerError || error instanceof SyntaxError) return error.message;
  return `The response failed: ${error}`;
}
