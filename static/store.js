/**
 * Where conversations are kept: IndexedDB, or memory where a browser refuses it.
 *
 * @import { Conversation } from "./conversation.js"
 *
 * @typedef {BrowserStore|MemoryStore} Store
 */

const DATABASE = "penstock";
const CONVERSATIONS = "conversations";

/**
 * @returns {Promise<Store>} both offer all(), get(id), put(conversation), delete(id), and say with `durable` whether a
 *   reload finds them again
 */
export async function openStore(factory = globalThis.indexedDB) {
  try {
    const opening = factory.open(DATABASE, 1);
    opening.onupgradeneeded = () =>
      opening.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    return new BrowserStore(await settled(opening));
  } catch {
    return new MemoryStore();
  }
}

class BrowserStore {
  durable = true;
  #database;

  /** @param {IDBDatabase} database */
  constructor(database) {
    this.#database = database;
  }

  /**
   * The conversation that changed last comes first.
   * @returns {Promise<Conversation[]>}
   */
  async all() {
    return newestFirst(await settled(this.#conversations("readonly").getAll()));
  }

  /**
   * @param {string} id
   * @returns {Promise<Conversation|undefined>}
   */
  get(id) {
    return settled(this.#conversations("readonly").get(id));
  }

  /** @param {Conversation} conversation */
  async put(conversation) {
    await settled(this.#conversations("readwrite").put(conversation));
  }

  /** @param {string} id */
  async delete(id) {
    await settled(this.#conversations("readwrite").delete(id));
  }

  /** @param {IDBTransactionMode} mode */
  #conversations(mode) {
    return this.#database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
  }
}

export class MemoryStore {
  durable = false;
  /** @type {Map<string, Conversation>} */
  #conversations = new Map();

  async all() {
    return newestFirst([...this.#conversations.values()].map((each) => structuredClone(each)));
  }

  /** @param {string} id */
  async get(id) {
    return structuredClone(this.#conversations.get(id));
  }

  /** @param {Conversation} conversation */
  async put(conversation) {
    this.#conversations.set(conversation.id, structuredClone(conversation));
  }

  /** @param {string} id */
  async delete(id) {
    this.#conversations.delete(id);
  }
}

/** @param {Conversation[]} conversations */
function newestFirst(conversations) {
  return conversations.sort((a, b) => b.updated - a.updated);
}

/**
 * @template T
 * @param {IDBRequest<T>} request
 * @returns {Promise<T>}
 */
function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
