/** A message that is not sent yet: its text and its files, which are kept as they change. */

import { AttachedFiles } from "./attached_files.js";
import { draftOf, filesOf, forgetDraft, forgetFiles, keepDraft, keepFiles } from "./drafts.js";

/**
 * @typedef {import("./attachments.js").Attached} Attached
 * @typedef {import("./attached_files.js").Reader} Reader
 */

const DRAFT_MS = 300;
const MOST_MS = 1000;

export class DraftMessage {
  /**
   * @param {Reader} reader
   * @param {{key: () => string, focus: () => void}} page key: the name of the draft
   * @param {{text: string, attached: Attached} | null} [edited] what the edited message has
   * @param {boolean} [empty] whether the draft before it is being sent, and so is not shown again
   */
  constructor(reader, { key, focus }, edited = null, empty = false) {
    this.key = key;
    const kept = empty ? null : draftOf(key());
    this.text = kept?.text ?? edited?.text ?? "";
    this.record = kept?.files;
    /** @type {string | undefined} the record that this page has written, so that no other tab shows it */
    this.own = undefined;
    /** @type {boolean | undefined} of an edit: whether its form is shown */
    this.open = edited ? true : undefined;
    this.sent = false;
    // A draft that the user has not touched must not replace one that is being sent.
    this.touched = edited !== null;
    this.timer = 0;
    /** @type {Promise<void>} */
    this.keeping = Promise.resolve();
    const first = edited ? Promise.resolve(edited.attached) : null;
    const changed = () => void (this.keeping = this.keeping.then(() => this.keepFiles()));
    this.files = new AttachedFiles(reader, { changed, focus }, this.record ? filesOf(this.record) : first);
  }

  /** @param {string} text */
  write(text) {
    this.text = text;
    this.touched = true;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.keep(), DRAFT_MS);
  }

  /** Keeps the text, at once. */
  keep() {
    clearTimeout(this.timer);
    if (this.sent || !this.touched) return;
    const { text, record, open } = this;
    const kept = draftOf(this.key());
    if (kept?.text === text && kept.files === record && kept.open === open) return;
    keepDraft(this.key(), { text, files: record, open });
  }

  async keepFiles() {
    const { files, own } = this;
    this.touched = true;
    const record = files.isEmpty && this.open === undefined ? undefined : await keepFiles(files.lists);
    this.record = this.own = record;
    this.keep();
    if (own) forgetFiles(own);
  }

  /** Waits until all files are read, and kept if the browser is not slow. */
  async settled() {
    await this.files.settled();
    await Promise.race([this.keeping, new Promise((resolve) => setTimeout(resolve, MOST_MS))]);
  }

  /** Forgets the draft without sending it. */
  forget() {
    this.sent = true;
    clearTimeout(this.timer);
    forgetDraft(this.key(), draftOf(this.key()));
  }

  /**
   * Keeps the draft until its message is stored, and forgets it then.
   * @param {() => Promise<boolean>} store returns whether it is stored
   */
  async send(store) {
    this.touched = true;
    this.keep();
    this.sent = true;
    const key = this.key();
    const kept = draftOf(key);
    if (await store()) forgetDraft(key, kept);
  }
}
