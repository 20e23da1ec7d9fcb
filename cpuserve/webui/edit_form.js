/** The form in which a message is edited: its text, and the files of a message of the user. */

import { composes, h, icon } from "./dom.js";
import { DraftMessage } from "./draft_message.js";
import { notify } from "./notice.js";

/**
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./attachments.js").Attached} Attached
 */

/** @param {Message} message */
export const editKey = (message) => `edit ${message.id}`;

export class EditForm {
  /**
   * @param {Message} message
   * @param {import("./attached_files.js").Reader} reader
   * @param {{
   *   mayBeSent: (text: string, attached: Attached) => Promise<boolean>,
   *   send: (text: string, attached: Attached, more: boolean) => Promise<boolean>,
   *   close: () => void,
   *   open: () => void,
   * }} page send: returns whether the new message is stored
   */
  constructor(message, reader, page) {
    this.message = message;
    this.page = page;
    this.isReply = message.role === "assistant";
    const label = this.isReply ? "Edited response" : "Edited message";
    this.area = /** @type {HTMLTextAreaElement} */ (h("textarea", { "aria-label": label, dir: "auto" }));
    const place = { key: () => editKey(message), focus: () => this.area.focus() };
    this.draft = new DraftMessage(reader, place, { text: message.text, attached: attachedOf(message) });
    this.area.value = this.draft.text;
    this.area.rows = Math.min(16, this.area.value.split("\n").length + 1);
    this.element = this.build();
    this.area.addEventListener("input", () => this.draft.write(this.area.value));
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    if (!this.isReply) this.draft.files.takePasted(this.area);
    this.leave = () => this.draft.keep();
    window.addEventListener("pagehide", this.leave);
    this.draft.keep();
  }

  build() {
    const button = (/** @type {string} */ text, /** @type {() => void} */ onclick) =>
      h("button", { type: "button", onclick }, text);
    const { files } = this.draft;
    const form = h(
      "form",
      { class: "edit", onsubmit: (/** @type {Event} */ e) => (e.preventDefault(), this.send()) },
      !this.isReply && files.element,
      this.area,
      h(
        "span",
        {},
        !this.isReply && this.attachButton(),
        h("button", { class: "primary" }, this.isReply ? "Save" : "Send"),
        this.isReply && button("Save and continue", () => this.send(true)),
        button("Cancel", () => this.cancel()),
      ),
    );
    form.addEventListener("drop", (event) => {
      if (this.isReply || !event.dataTransfer?.files.length) return;
      event.preventDefault();
      files.add([...event.dataTransfer.files]);
    });
    return form;
  }

  attachButton() {
    const choose = /** @type {HTMLInputElement} */ (
      h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files of the message" })
    );
    choose.addEventListener("change", async () => {
      await this.draft.files.add([...(choose.files ?? [])]);
      choose.value = "";
    });
    const label = "Attach files to the message";
    const attributes = { type: "button", class: "icon-button", "aria-label": label, title: label };
    return [choose, h("button", { ...attributes, onclick: () => choose.click() }, icon("clip"))];
  }

  get isChanged() {
    return this.area.value !== this.message.text || this.draft.record !== undefined;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    event.stopPropagation();
    if (composes(event)) return;
    if (event.key === "Escape") this.close();
    // In a response, Enter is a new line: responses have many.
    if (event.key === "Enter" && !event.shiftKey && !this.isReply) {
      event.preventDefault();
      this.send();
    }
  }

  async send(more = false) {
    await this.draft.settled();
    if (this.draft.sent) return;
    const { lists } = this.draft.files;
    if (!this.isReply && !(await this.page.mayBeSent(this.area.value, lists))) return;
    if (this.draft.sent) return;
    this.draft.text = this.area.value;
    this.end();
    this.draft.send(() => this.page.send(this.draft.text, lists, more));
  }

  /** Closes the form; what has been changed stays for the next time. */
  close() {
    this.draft.text = this.area.value;
    this.draft.open = false;
    if (this.isChanged) this.draft.keep();
    else this.draft.forget();
    this.end();
  }

  cancel() {
    const { text, lists } = { text: this.area.value, lists: this.draft.files.lists };
    const changed = this.isChanged;
    this.draft.forget();
    this.end();
    if (!changed) return;
    const act = () => {
      const again = new DraftMessage(this.draft.files.reader, { key: this.draft.key, focus: () => {} }, { text, attached: lists });
      again.keepFiles().then(this.page.open);
    };
    notify("The edit is discarded.", { label: "Undo", act });
  }

  end() {
    window.removeEventListener("pagehide", this.leave);
    this.page.close();
  }
}

/**
 * Returns the files of a message.
 * @param {Message} message
 * @returns {Attached}
 */
function attachedOf({ images, seen = [], documents = [], files }) {
  return { images: images.map((url, i) => ({ url, seen: seen[i] ?? {} })), documents: [...documents], files: [...files] };
}
