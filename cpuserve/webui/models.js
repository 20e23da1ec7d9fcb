/** The models of the server, and what the page has to know about each. */

import { json, ServerError } from "./api.js";

/**
 * An entry of /v1/models.
 * @typedef {{id: string, parent: string | null, context_length: number | null,
 *   architecture: {input_modalities: string[]} | null}} Card
 */

export class Models {
  /** @type {Card[]} */
  cards = [];

  async load() {
    const { data } = await json("v1/models");
    this.cards = data;
  }

  /**
   * Returns the first name that the server has; its first model if it has none of them.
   * @param {...(string | undefined)} names
   */
  first(...names) {
    const known = names.find((name) => this.cards.some((card) => card.id === name));
    return known ?? this.cards[0]?.id ?? "";
  }

  /** @param {string} name */
  card(name) {
    return this.cards.find((card) => card.id === name);
  }

  /**
   * Returns whether a model may read pictures; the page knows it only for models that are loaded.
   * @param {string} name
   */
  readsPictures(name) {
    return this.card(name)?.architecture?.input_modalities.includes("image") ?? true;
  }

  /**
   * Returns what a model sees of a picture or a document. An error says why the server refuses it.
   * @param {string} name
   * @param {import("./conversation.js").Part} part
   * @returns {Promise<{pictures: import("./conversation.js").Seen[], tokens: number}>} [] and 0 if the server does
   *   not say
   */
  async measure(name, part) {
    const unknown = { pictures: [], tokens: 0 };
    if (!this.card(name)?.architecture) return unknown; // the request would load the model
    try {
      const messages = [{ role: "user", content: [part] }];
      const { pictures = [], count } = await json("tokenize", { json: { model: name, messages } });
      return { pictures, tokens: count };
    } catch (error) {
      if (!(error instanceof ServerError) || ![400, 413].includes(error.status)) return unknown;
      throw new Error(error.message.replace(/^messages\[0\]\.content\[0\] /, "this file "));
    }
  }
}
