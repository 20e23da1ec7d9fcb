/** A store of records with ids in this browser (IndexedDB). */

export class Store {
  /**
   * Several stores have a database each: a further store in a database waits until all older pages are closed.
   * @param {string} database
   * @param {string} name
   */
  constructor(database, name) {
    this.database = database;
    this.name = name;
    /** @type {Promise<IDBDatabase> | undefined} */
    this.opened = undefined;
  }

  /** @returns {Promise<IDBDatabase>} */
  open() {
    this.opened ??= new Promise((resolve, reject) => {
      const asked = indexedDB.open(this.database, 1);
      asked.onupgradeneeded = () => asked.result.createObjectStore(this.name, { keyPath: "id" });
      asked.onsuccess = () => {
        // Who removes the database must not wait for this page.
        asked.result.onversionchange = () => {
          asked.result.close();
          this.opened = undefined;
        };
        resolve(asked.result);
      };
      asked.onerror = () => reject(asked.error);
    });
    return this.opened;
  }

  /**
   * Runs requests on the store and returns the first one's result when the transaction has been committed.
   * @template T
   * @param {IDBTransactionMode} mode
   * @param {(store: IDBObjectStore) => IDBRequest<T> | undefined} use
   * @returns {Promise<T | undefined>}
   */
  async run(mode, use) {
    const transaction = (await this.open()).transaction(this.name, mode);
    const asked = use(transaction.objectStore(this.name));
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(asked?.result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? asked?.error);
    });
  }
}
