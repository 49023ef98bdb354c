/**
 * Where conversations are kept: IndexedDB, or memory where a browser refuses it. Messages are kept one by one, so that
 * one that grows is written alone, and read when their conversation is first needed.
 *
 * @import { Conversation, Head, Message } from "./conversation.js"
 *
 * @typedef {BrowserStore|MemoryStore} Store
 *
 * @typedef {Message & {conversation: string, at: number}} Row  of a message: at: its place in the conversation
 */

import { headOf } from "./conversation.js";

const DATABASE = "penstock";
const VERSION = 2;
const BLOCKED_MS = 2_000; // an older page in another tab may never close the database
const HEADS = "conversations";
const MESSAGES = "messages";

/**
 * @returns {Promise<Store>} both offer heads(), messages(id), put(conversation, messages), delete(id), and say with
 *   `durable` whether a reload finds them again
 */
export async function openStore(factory = globalThis.indexedDB) {
  try {
    const opening = factory.open(DATABASE, VERSION);
    opening.onupgradeneeded = ({ oldVersion }) => upgrade(opening, oldVersion);
    const database = await new Promise((resolve, reject) => {
      opening.onblocked = () => setTimeout(reject, BLOCKED_MS);
      settled(opening).then(resolve, reject);
    });
    database.onversionchange = () => database.close(); // else a newer page in another tab waits for this one
    return new BrowserStore(database);
  } catch {
    return new MemoryStore();
  }
}

/** The first version kept a conversation whole. @param {IDBOpenDBRequest} opening  @param {number} oldVersion */
function upgrade({ result: database, transaction }, oldVersion) {
  if (oldVersion === 0) database.createObjectStore(HEADS, { keyPath: "id" });
  const rows = database.createObjectStore(MESSAGES, { keyPath: ["conversation", "id"] });
  if (oldVersion === 0 || transaction === null) return;
  const reading = transaction.objectStore(HEADS).openCursor();
  reading.onsuccess = () => {
    const cursor = reading.result;
    if (cursor === null) return;
    /** @type {Conversation} */
    const old = cursor.value;
    for (const row of rowsOf(old, old.messages)) rows.put(row);
    cursor.update(headOf(old));
    cursor.continue();
  };
}

/** @param {Pick<Conversation, "id"|"messages">} conversation  @param {Message[]} messages  of it */
function rowsOf(conversation, messages) {
  return messages.map((message) => {
    return { ...message, conversation: conversation.id, at: conversation.messages.indexOf(message) };
  });
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
   * @returns {Promise<Head[]>}
   */
  async heads() {
    return newestFirst(await settled(this.#begin("readonly").objectStore(HEADS).getAll()));
  }

  /**
   * @param {string} id  of a conversation
   * @returns {Promise<Message[]>} in the order in which they were made
   */
  async messages(id) {
    /** @type {Row[]} */
    const rows = await settled(this.#begin("readonly").objectStore(MESSAGES).getAll(rangeOf(id)));
    return rows.sort((a, b) => a.at - b.at).map(({ conversation: _, at: __, ...message }) => message);
  }

  /**
   * @param {Conversation} conversation
   * @param {Message[]} messages  those of it that changed
   */
  async put(conversation, messages) {
    const transaction = this.#begin("readwrite");
    for (const row of rowsOf(conversation, messages)) transaction.objectStore(MESSAGES).put(row);
    await settled(transaction.objectStore(HEADS).put(headOf(conversation)));
  }

  /** @param {string} id */
  async delete(id) {
    const transaction = this.#begin("readwrite");
    transaction.objectStore(MESSAGES).delete(rangeOf(id));
    await settled(transaction.objectStore(HEADS).delete(id));
  }

  /** @param {IDBTransactionMode} mode */
  #begin(mode) {
    return this.#database.transaction([HEADS, MESSAGES], mode);
  }
}

/** All rows of a conversation: an array comes after every string. @param {string} id */
function rangeOf(id) {
  return IDBKeyRange.bound([id], [id, []]);
}

/** Keeps what is put for as long as the page lives. */
export class MemoryStore {
  durable = false;
  /** @type {Map<string, {head: Head, messages: Map<string, Message>}>} */
  #kept = new Map();

  async heads() {
    return newestFirst([...this.#kept.values()].map(({ head }) => ({ ...head })));
  }

  /** @param {string} id */
  async messages(id) {
    return structuredClone([...(this.#kept.get(id)?.messages.values() ?? [])]);
  }

  /** @param {Conversation} conversation  @param {Message[]} messages */
  async put(conversation, messages) {
    const kept = this.#kept.get(conversation.id)?.messages ?? new Map();
    for (const message of messages) kept.set(message.id, structuredClone(message));
    this.#kept.set(conversation.id, { head: headOf(conversation), messages: kept });
  }

  /** @param {string} id */
  async delete(id) {
    this.#kept.delete(id);
  }
}

/** @param {Head[]} heads */
function newestFirst(heads) {
  return heads.sort((a, b) => b.updated - a.updated);
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
