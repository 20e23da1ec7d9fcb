/** Shows the selected branch of a conversation, and does what the buttons of its messages ask for. */

import {
  addMessage,
  branch,
  change,
  childrenOf,
  removeMessage,
  restore,
  selectBranch,
} from "./conversation.js";
import { copyText } from "./copy.js";
import { byId } from "./dom.js";
import { resultOf } from "./generation.js";
import { MessageView } from "./message_view.js";
import { notify } from "./notice.js";

/**
 * @typedef {import("./conversation.js").Conversation} Conversation
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./attachments.js").Attached} Attached
 */

const NEAR_END = 80;
// So many messages at the end are drawn at once; the others when they come near the screen.
const DRAWN_AT_ONCE = 12;
const NEAR_SCREEN = "1200px";

export class Chat {
  /**
   * @param {import("./generation.js").Generator} generator
   * @param {{
   *   changed: (conversation: Conversation) => Promise<boolean>,
   *   reader: import("./attached_files.js").Reader,
   *   ownTools: () => Set<string>,
   *   mayBeSent: (parent: string | null, text: string, attached: Attached) => Promise<boolean>,
   *   isFull: (message: Message) => boolean,
   *   shorten: () => void,
   *   sendAll: () => void,
   *   stopElsewhere: (message: Message) => void,
   *   shown: () => void,
   * }} page
   */
  constructor(generator, page) {
    this.generator = generator;
    this.page = page;
    this.list = byId("messages");
    this.scroller = byId("scroller");
    /** @type {Conversation | null} */
    this.conversation = null;
    /** @type {Map<string, MessageView>} */
    this.views = new Map();
    this.drawing = 0;
    this.follows = true;
    this.scrolled = 0;
    this.near = new IntersectionObserver((seen) => this.drawNear(seen), {
      root: this.scroller,
      rootMargin: `${NEAR_SCREEN} 0px`,
    });
    const resized = new ResizeObserver(() => this.follows && this.toEnd());
    resized.observe(this.list);
    resized.observe(this.scroller);
    this.scroller.addEventListener("scroll", () => this.onScroll());
    this.list.addEventListener("click", copyCode);
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.conversation = conversation;
    this.follows = true;
    this.views.clear();
    this.list.replaceChildren();
    this.draw();
    this.toEnd();
  }

  /** @param {Conversation} conversation */
  isShown(conversation) {
    return conversation === this.conversation;
  }

  /** Whether a message of the shown conversation is being generated, by this tab or another one. */
  get running() {
    return this.streaming() !== undefined;
  }

  /** @returns {Message | undefined} */
  streaming() {
    const run = this.conversation && this.generator.run(this.conversation);
    return run?.message ?? branch(this.shown()).findLast((message) => message.state === "streaming");
  }

  stop() {
    const message = this.streaming();
    if (!message) return;
    this.generator.stop(this.shown());
    if (message.state === "streaming") this.page.stopElsewhere(message);
    this.draw();
  }

  /** Draws the messages of the selected branch; a message that is already on the page keeps its elements. */
  draw() {
    const conversation = this.shown();
    const messages = branch(conversation);
    const children = childrenOf(conversation);
    // An event of an earlier scroll, which the browser still holds, must not end the following.
    if (this.follows) requestAnimationFrame(() => this.toEnd());
    byId("welcome").hidden = messages.length > 0;
    const before = this.views;
    this.views = new Map();
    messages.forEach((message, i) => {
      const siblings = children.get(message.parent) ?? [];
      const known = before.get(message.id);
      const view = known?.message === message ? known : new MessageView(message, this.actions());
      view.place(siblings, conversation.options.from === message.id && i > 0);
      const atOnce = i >= messages.length - DRAWN_AT_ONCE;
      if (atOnce) view.draw();
      if (view !== known && !atOnce) this.near.observe(view.element);
      this.views.set(message.id, view);
    });
    this.placeElements();
    for (const message of messages.slice(-2)) this.update(message);
    this.page.shown();
  }

  /** Puts the elements of the views into the list, and moves none that is in its place. */
  placeElements() {
    const wanted = new Set([...this.views.values()].map((view) => view.element));
    for (const element of [...this.list.children]) if (!wanted.has(/** @type {HTMLElement} */ (element))) element.remove();
    let next = this.list.firstChild;
    for (const element of wanted) {
      if (element === next) next = next.nextSibling;
      else this.list.insertBefore(element, next);
    }
  }

  /** @param {IntersectionObserverEntry[]} seen */
  drawNear(seen) {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      this.near.unobserve(target);
      this.views.get(target.id.slice(2))?.draw();
    }
  }

  /** @param {Message} message */
  update(message) {
    const run = this.conversation && this.generator.run(this.conversation);
    const progress = run?.message === message ? run.progress : null;
    this.views.get(message.id)?.update(this.openCalls(message), progress);
  }

  /**
   * Shows soon what has been added to a message.
   * @param {Message} message
   */
  updateSoon(message) {
    this.drawing ||= requestAnimationFrame(() => {
      this.drawing = 0;
      this.update(message);
      this.page.shown();
    });
  }

  shown() {
    if (!this.conversation) throw new Error("no conversation is shown");
    return this.conversation;
  }

  /** @returns {import("./message_view.js").Actions} */
  actions() {
    return {
      reader: this.page.reader,
      mayBeSent: (message, text, attached) => this.page.mayBeSent(message.parent, text, attached),
      edit: (message, text, attached) => this.edit(message, text, attached),
      editReply: (message, text, more) => this.editReply(message, text, more),
      retry: (message) => this.respond(message.parent),
      resume: (message) => this.resume(message),
      remove: (message) => this.remove(message),
      select: (message) => this.select(message),
      result: (message, callId, result) => this.addResult(message, callId, result),
      isFull: (message) => this.page.isFull(message),
      shorten: () => this.page.shorten(),
      sendAll: () => this.page.sendAll(),
    };
  }

  /** @param {string | null} parent */
  async respond(parent) {
    this.stop();
    this.follows = true;
    await this.generator.respond(this.shown(), parent);
  }

  /** @param {Message} message */
  async resume(message) {
    this.stop();
    this.follows = true;
    await this.generator.resume(this.shown(), message);
  }

  /**
   * Adds a user message and generates a response to it.
   * @param {string | null} parent
   * @param {string} text
   * @param {Attached} attached
   * @returns {Promise<boolean>} whether the message is stored
   */
  send(parent, text, { images, documents, files }) {
    this.stop();
    const conversation = this.shown();
    const pictures = { images: images.map(({ url }) => url), seen: images.map(({ seen }) => seen) };
    const message = addMessage(conversation, parent, { role: "user", text, ...pictures, documents, files });
    const stored = this.page.changed(conversation);
    this.respond(message.id);
    return stored;
  }

  /**
   * @param {Message} message
   * @param {string} text
   * @param {Attached} attached
   */
  edit(message, text, attached) {
    return this.send(message.parent, text, attached);
  }

  /**
   * Adds a branch with the user's version of a response.
   * @param {Message} message
   * @param {string} text
   * @param {boolean} more whether the model continues it
   * @returns {Promise<boolean>} whether it is stored
   */
  editReply(message, text, more) {
    this.stop();
    const { role, model, thought } = message;
    const conversation = this.shown();
    const edited = addMessage(conversation, message.parent, { role, model, thought, text, edited: true });
    const stored = this.page.changed(conversation);
    if (more) this.resume(edited);
    else this.draw();
    return stored;
  }

  redraw() {
    this.draw();
    this.page.changed(this.shown());
  }

  /** @param {Message} message */
  select(message) {
    selectBranch(this.shown(), message);
    this.redraw();
  }

  /** @param {Message} message */
  remove(message) {
    this.stop();
    const conversation = this.shown();
    const head = conversation.head;
    const gone = removeMessage(conversation, message);
    this.redraw();
    const what = gone.length === 1 ? "The message is deleted." : `${gone.length} messages are deleted.`;
    const act = () => {
      restore(conversation, gone, head);
      if (this.isShown(conversation)) this.draw();
      this.page.changed(conversation);
    };
    notify(what, { label: "Undo", act });
  }

  /**
   * Returns the tool calls of `message` that wait for a result from the user.
   * @param {Message} message
   */
  openCalls(message) {
    if (message.role !== "assistant" || message.state !== "done" || !message.calls.length) return new Set();
    const messages = Object.values(this.shown().messages);
    if (messages.some((other) => other.parent === message.id)) return new Set();
    const own = this.page.ownTools();
    return new Set(message.calls.filter((call) => resultOf(message, call, own) === null).map((call) => call.id));
  }

  /**
   * @param {Message} message
   * @param {string} callId
   * @param {string} result
   */
  async addResult(message, callId, result) {
    const conversation = this.shown();
    change(message, { results: { ...message.results, [callId]: result } });
    const last = this.generator.answerCalls(conversation, message);
    if (last) await this.respond(last);
    else this.redraw();
  }

  onScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    // The event of a scroll to the end comes when the text may have grown again: only a scroll upwards is the reader's.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this.follows = true;
    else if (scrollTop < this.scrolled) this.follows = false;
    this.scrolled = scrollTop;
    byId("newest").hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    byId("newest").hidden = true;
  }
}

/** @param {Event} event */
async function copyCode(event) {
  const button = /** @type {HTMLElement} */ (event.target).closest("[data-copy]");
  if (!(button instanceof HTMLElement)) return;
  const done = await copyText(button.dataset.copy ?? "");
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/**
 * Announces a text to screen readers, which do not read streams aloud token by token.
 * @param {string} text
 */
export function announce(text) {
  byId("announce").textContent = text;
}
