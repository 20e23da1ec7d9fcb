/** The chat: sends messages, shows streams, runs tools, and keeps the tree of branches. */

import { ServerError, stream } from "./api.js";
import {
  addMessage,
  apiMessages,
  branch,
  removeMessage,
  selectBranch,
  siblings,
} from "./conversation.js";
import { byId } from "./dom.js";
import { MessageView } from "./message_view.js";
import { requestFields } from "./settings.js";
import { runTool } from "./tools.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./settings.js").Settings} Settings
 */

// Limits how often a model may call tools in a row; the user can always continue.
const MAX_ROUNDS = 16;
const NEAR_END = 80;

export class Chat {
  /**
   * @param {Settings} settings
   * @param {{changed: (conversation: Conversation) => void, running: (running: boolean) => void}} page
   */
  constructor(settings, page) {
    this.settings = settings;
    this.page = page;
    this.list = byId("messages");
    this.scroller = byId("scroller");
    /** @type {Conversation | null} */
    this.conversation = null;
    /** @type {Map<string, MessageView>} */
    this.views = new Map();
    /** @type {AbortController | null} */
    this.running = null;
    this.list.addEventListener("click", copyCode);
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.stop();
    this.conversation = conversation;
    this.draw();
    this.toEnd();
  }

  /** Draws the messages of the selected branch. */
  draw() {
    const conversation = this.shown();
    const messages = branch(conversation);
    byId("welcome").hidden = messages.length > 0;
    this.views = new Map(
      messages.map((message) => [
        message.id,
        new MessageView(message, siblings(conversation, message), this.actions()),
      ]),
    );
    this.list.replaceChildren(...[...this.views.values()].map((view) => view.element));
    const last = messages.at(-1);
    if (last) this.views.get(last.id)?.update(false, this.openCalls(last));
  }

  shown() {
    if (!this.conversation) throw new Error("no conversation is shown");
    return this.conversation;
  }

  /** @returns {import("./message_view.js").Actions} */
  actions() {
    return {
      edit: (message, text) => this.edit(message, text),
      retry: (message) => this.respond(message.parent),
      resume: (message) => this.resume(message),
      remove: (message) => this.change(() => removeMessage(this.shown(), message)),
      select: (message) => this.change(() => selectBranch(this.shown(), message)),
      result: (message, callId, result) => this.addResult(message, callId, result),
    };
  }

  /** @param {() => void} change */
  change(change) {
    this.stop();
    change();
    this.draw();
    this.page.changed(this.shown());
  }

  /**
   * Adds a user message and generates a response to it.
   * @param {string} text
   * @param {string[]} images
   * @param {import("./conversation.js").TextFile[]} files
   */
  async send(text, images, files) {
    const conversation = this.shown();
    const message = addMessage(conversation, conversation.head, { role: "user", text, images, files });
    await this.respond(message.id);
  }

  /**
   * @param {Message} message
   * @param {string} text
   */
  async edit(message, text) {
    const { images, files } = message;
    const values = { role: message.role, text, images, files };
    await this.respond(addMessage(this.shown(), message.parent, values).id);
  }

  /**
   * Generates responses after `parent` until the model calls no tool, or a tool that the user has to run.
   * @param {string | null} parent
   */
  async respond(parent) {
    this.stop();
    const conversation = this.shown();
    let after = parent;
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      const model = this.settings.model;
      const message = addMessage(conversation, after, { role: "assistant", model });
      const complete = await this.generate(conversation, message, { messages: apiMessages(conversation, after) });
      if (!complete || !message.calls.length) return;
      const last = runCalls(conversation, message);
      if (conversation === this.conversation) this.draw();
      this.page.changed(conversation);
      if (!last) return;
      after = last;
    }
  }

  /**
   * Continues a response that was interrupted or reached its maximum number of tokens.
   * @param {Message} message
   */
  async resume(message) {
    this.stop();
    const conversation = this.shown();
    message.error = undefined;
    message.finish = undefined;
    const messages = apiMessages(conversation, message.id);
    const more = { continue_final_message: true, add_generation_prompt: false };
    await this.generate(conversation, message, { messages, ...more });
  }

  /**
   * Streams one response into `message`.
   * @param {Conversation} conversation
   * @param {Message} message
   * @param {Record<string, unknown>} fields
   * @returns {Promise<boolean>} whether the response is complete
   */
  async generate(conversation, message, fields) {
    const running = new AbortController();
    this.running = running;
    this.page.running(true);
    this.draw();
    this.views.get(message.id)?.update(true);
    this.toEnd();
    this.page.changed(conversation);
    const reader = new ResponseReader(message);
    let drawing = 0;
    const draw = () => {
      drawing = 0;
      const follow = this.isAtEnd();
      this.views.get(message.id)?.update(this.running === running);
      if (follow) this.toEnd();
    };
    try {
      const body = { ...requestFields(this.settings), ...fields, ...STREAM };
      if (this.settings.model) Object.assign(body, { model: this.settings.model });
      for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
        reader.read(chunk);
        drawing ||= requestAnimationFrame(draw);
      }
      announce("The response is complete.");
      return true;
    } catch (error) {
      if (!running.signal.aborted) message.error = reasonOf(error);
      return false;
    } finally {
      cancelAnimationFrame(drawing);
      if (this.running === running) {
        this.running = null;
        this.page.running(false);
      }
      this.views.get(message.id)?.update(false, this.openCalls(message));
      if (conversation === this.conversation && this.isAtEnd()) this.toEnd();
      this.page.changed(conversation);
    }
  }

  stop() {
    const running = this.running;
    this.running = null;
    running?.abort();
    if (running) this.page.running(false);
  }

  /**
   * Returns the tool calls of `message` that wait for a result from the user.
   * @param {Message} message
   */
  openCalls(message) {
    if (message.error || message.role !== "assistant") return new Set();
    const children = Object.values(this.shown().messages).filter((m) => m.parent === message.id);
    if (children.length) return new Set();
    return new Set(message.calls.map((call) => call.id).filter((id) => !this.results.has(id)));
  }

  /** Results that the user has entered while other calls of the same message still wait. */
  results = new Map();

  /**
   * @param {Message} message
   * @param {string} callId
   * @param {string} result
   */
  async addResult(message, callId, result) {
    this.results.set(callId, result);
    const conversation = this.shown();
    const last = runCalls(conversation, message, this.results);
    if (last) await this.respond(last);
    else this.views.get(message.id)?.update(false, this.openCalls(message));
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

const STREAM = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };

/**
 * Adds a message with the result of each call; returns null if the user has to enter a result.
 * @param {Conversation} conversation
 * @param {Message} message
 * @param {Map<string, string>} [written]
 * @returns {string | null} the id of the last result
 */
function runCalls(conversation, message, written = new Map()) {
  const results = message.calls.map((call) => {
    const { name, arguments: given } = call.function;
    return { call, text: written.get(call.id) ?? runTool(name, given) };
  });
  if (results.some((result) => result.text === null)) return null;
  let parent = message.id;
  for (const { call, text } of results) {
    const values = { text: /** @type {string} */ (text), callId: call.id, name: call.function.name };
    parent = addMessage(conversation, parent, { role: "tool", ...values }).id;
  }
  return parent;
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
    if (!chunk.usage || !this.first) return;
    message.figures = {
      prompt: chunk.usage.prompt_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      tokens: this.before.tokens + chunk.usage.completion_tokens,
      seconds: this.before.seconds + (now - this.first) / 1000,
      first: (this.first - this.sent) / 1000,
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

/** @param {Event} event */
async function copyCode(event) {
  const button = /** @type {HTMLElement} */ (event.target).closest("[data-copy]");
  if (!(button instanceof HTMLElement)) return;
  await navigator.clipboard.writeText(button.dataset.copy ?? "");
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/**
 * Announces a text to screen readers, which do not read streams aloud token by token.
 * @param {string} text
 */
export function announce(text) {
  byId("announce").textContent = text;
}
