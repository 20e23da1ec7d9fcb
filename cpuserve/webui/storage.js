/**
 * Small texts that this browser (`local`) or this tab (`session`) remembers.
 *
 * A browser that blocks storage throws already where the page names it, so each access is caught: the page
 * then works, and remembers the texts until it is closed.
 */

export class Storage {
  /** @param {() => globalThis.Storage} place */
  constructor(place) {
    this.place = place;
    /** @type {Map<string, string>} what the browser does not keep */
    this.held = new Map();
  }

  /**
   * @param {string} prefix
   * @returns {string[]} the names that begin with it
   */
  names(prefix) {
    try {
      return Object.keys(this.place()).filter((name) => name.startsWith(prefix));
    } catch {
      return [];
    }
  }

  /** @param {string} name */
  get(name) {
    try {
      return this.held.get(name) ?? this.place().getItem(name);
    } catch {
      return this.held.get(name) ?? null;
    }
  }

  /**
   * @param {string} name
   * @param {string | null} text null removes it
   */
  set(name, text) {
    this.held.delete(name);
    try {
      if (text === null) this.place().removeItem(name);
      else this.place().setItem(name, text);
    } catch {
      if (text !== null) this.held.set(name, text);
    }
  }
}

export const local = new Storage(() => localStorage);
export const session = new Storage(() => sessionStorage);
