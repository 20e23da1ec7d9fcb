/** What the tabs of this page tell each other: which conversations changed, and which tab streams a message. */

const CHANNEL = "cpuserve";
// A tab that is busy drawing answers later than one that is idle; a closed tab never answers.
const ANSWER_MS = 1500;

/**
 * @typedef {{kind: "saved" | "removed" | "stop" | "whose" | "mine", id: string}} Note
 *   saved, removed: the id of a conversation; stop, whose, mine: the id of a message
 */

export class Tabs {
  /**
   * @param {{
   *   saved: (id: string) => void,
   *   removed: (id: string) => void,
   *   stop: (id: string) => void,
   *   streams: (id: string) => boolean,
   * }} page what this tab does with a note; `streams` says whether this tab generates a message
   */
  constructor(page) {
    this.page = page;
    /** @type {BroadcastChannel | null} */
    this.channel = null;
    /** @type {Map<string, () => void>} what to do when a tab claims the message */
    this.asked = new Map();
    try {
      this.channel = new BroadcastChannel(CHANNEL);
      this.channel.onmessage = (event) => this.read(event.data);
    } catch {
      // The browser blocks storage, and so there is nothing that tabs share.
    }
  }

  /**
   * @param {Note["kind"]} kind
   * @param {string} id
   */
  tell(kind, id) {
    this.channel?.postMessage({ kind, id });
  }

  /** @param {Note} note */
  read({ kind, id }) {
    if (kind === "saved" || kind === "removed" || kind === "stop") this.page[kind](id);
    else if (kind === "whose" && this.page.streams(id)) this.tell("mine", id);
    else if (kind === "mine") this.asked.get(id)?.();
  }

  /**
   * Returns whether another tab streams a message.
   * @param {string} id
   * @returns {Promise<boolean>}
   */
  async ask(id) {
    if (!this.channel) return false;
    return new Promise((resolve) => {
      const answer = (/** @type {boolean} */ streams) => {
        this.asked.delete(id);
        clearTimeout(timer);
        resolve(streams);
      };
      const timer = setTimeout(() => answer(false), ANSWER_MS);
      this.asked.set(id, () => answer(true));
      this.tell("whose", id);
    });
  }
}
