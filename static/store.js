/** Where conversations are kept: IndexedDB, or memory where a browser refuses it. */

const DATABASE = "penstock";
const CONVERSATIONS = "conversations";

/**
 * @returns {Promise<BrowserStore|MemoryStore>} both offer all(), get(id), put(conversation), delete(id),
 *   and say with `durable` whether a reload finds them again
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

  constructor(database) {
    this.#database = database;
  }

  /** The conversation that changed last comes first. */
  async all() {
    return newestFirst(await settled(this.#conversations("readonly").getAll()));
  }

  get(id) {
    return settled(this.#conversations("readonly").get(id));
  }

  async put(conversation) {
    await settled(this.#conversations("readwrite").put(conversation));
  }

  async delete(id) {
    await settled(this.#conversations("readwrite").delete(id));
  }

  #conversations(mode) {
    return this.#database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
  }
}

export class MemoryStore {
  durable = false;
  #conversations = new Map();

  async all() {
    return newestFirst([...this.#conversations.values()].map((each) => structuredClone(each)));
  }

  async get(id) {
    return structuredClone(this.#conversations.get(id));
  }

  async put(conversation) {
    this.#conversations.set(conversation.id, structuredClone(conversation));
  }

  async delete(id) {
    this.#conversations.delete(id);
  }
}

function newestFirst(conversations) {
  return conversations.sort((a, b) => b.updated - a.updated);
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
