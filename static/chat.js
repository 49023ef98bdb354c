/**
 * What the user can do: the conversations, and the answers being made in them.
 *
 * @import { Conversation, Message } from "./conversation.js"
 * @import { Scope } from "./run.js"
 * @import { Store } from "./store.js"
 * @import { Told } from "./tabs.js"
 * @import { Body, WirePath } from "./wires.js"
 *
 * @typedef {object} ChatView
 * @property {(conversation: Conversation) => void} showConversation
 * @property {(message: Message) => void} showMessage
 * @property {() => void} showVersions
 * @property {() => void} showList
 * @property {() => void} showUnkept  the browser did not keep a change
 *
 * @typedef {object} Choices  what goes with each request, read when it is sent
 * @property {() => Promise<Body>} fields
 * @property {() => string} systemPrompt
 * @property {() => boolean} isKept  by the server, too
 * @property {() => ?string} key
 */

import { forget } from "./api.js";
import {
  ask,
  askAgain,
  headOf,
  isEmpty,
  isRunning,
  newConversation,
  runningIn,
  saidBefore,
  settle,
  shownIn,
  takeOver,
} from "./conversation.js";
import { runAnswer } from "./run.js";
import { Tabs } from "./tabs.js";
import { hasFollowers, newestEnd, siblingsOf } from "./tree.js";
import { CHAT, RESPONSES, WIRES } from "./wires.js";

const MAX_AUTOMATIC_RETRIES = 3;
const SAVE_EVERY_MS = 1000;

export class Chat {
  /** @type {Conversation[]} */
  conversations = [];
  current = newConversation();
  #store;
  #view;
  #choices;
  /** @type {Map<string, AbortController>} of its answer, by a conversation's id */
  #runs = new Map();
  /** @type {Set<Message>} the answers that this tab makes; others that run are another's */
  #made = new Set();
  #tabs = new Tabs((told) => this.#hear(told));
  /** @type {?Promise<void>} */
  #loading = null;
  /** @type {WeakMap<Message, number>} an answer's automatic retries since the user last acted */
  #retries = new WeakMap();
  /** @type {Map<Conversation, Message>} answers that grow, with news that are kept soon */
  #unsaved = new Map();
  /** @type {WeakMap<Conversation, Promise<void>>} messages that are being read */
  #reading = new WeakMap();

  /**
   * @param {Store} store
   * @param {ChatView} view
   * @param {Choices} choices
   */
  constructor(store, view, choices) {
    this.#store = store;
    this.#view = view;
    this.#choices = choices;
  }

  /** @returns {Set<string>} ids of the conversations in which an answer is being made */
  get running() {
    return new Set(this.#runs.keys());
  }

  get isBusy() {
    return this.#runs.has(this.current.id);
  }

  /** The messages of the branch that is shown. */
  get shown() {
    return shownIn(this.current);
  }

  /** An answer that was being made when the page closed goes on. */
  load() {
    this.#loading = this.#load();
    return this.#loading;
  }

  async #load() {
    const heads = await this.#store.heads();
    this.conversations = heads.map((head) => ({ ...head, messages: [], isRead: false }));
    const running = this.conversations.filter((_, at) => heads[at].running);
    await Promise.all(running.map((each) => this.#read(each)));
  }

  /**
   * Reads the messages of a conversation, once.
   * @param {Conversation} conversation
   */
  #read(conversation) {
    if (conversation.isRead) return Promise.resolve();
    const reading = this.#reading.get(conversation) ?? this.#readNow(conversation);
    this.#reading.set(conversation, reading);
    return reading;
  }

  /** @param {Conversation} conversation */
  async #readNow(conversation) {
    const kept = await this.#store.messages(conversation.id);
    if (conversation.isRead) return; // another tab has sent them meanwhile
    conversation.messages = kept;
    conversation.isRead = true;
    settle(conversation, Date.now());
    this.#follow(conversation);
  }

  /** Reads all that was ever said, for a search or a file. */
  async readAll() {
    await Promise.all(this.conversations.map((each) => this.#read(each)));
  }

  /** @param {?string} id  an unknown one opens an empty conversation */
  async open(id) {
    const known = this.conversations.find((each) => each.id === id);
    if (known === undefined && !isEmpty(this.current)) this.current = newConversation();
    if (known !== undefined) this.current = known;
    const wanted = this.current;
    if (!wanted.isRead) await this.#read(wanted);
    if (wanted === this.current) this.#view.showConversation(wanted);
  }

  /**
   * @param {string} text
   * @param {?Message} edited  the user's message that the text is another version of: a branch of its own
   */
  async send(text, edited = null) {
    const conversation = this.current;
    if (!conversation.isRead) await this.#read(conversation);
    if (this.#runs.has(conversation.id)) return;
    const answer = edited === null ? ask(conversation, text) : ask(conversation, text, edited.parent);
    if (!this.conversations.includes(conversation)) {
      this.conversations.push(conversation);
      navigator.storage?.persist?.().catch(() => {}); // else a browser that lacks room may delete it
    }
    this.#answer(conversation, answer);
  }

  /** Another answer to the same question. @param {Message} answer */
  retry(answer) {
    this.#retries.delete(answer);
    this.#again(answer);
  }

  /** @param {Message} answer */
  retryAutomatically(answer) {
    const done = this.#retries.get(answer) ?? 0;
    if (done >= MAX_AUTOMATIC_RETRIES || hasFollowers(this.current.messages, answer)) {
      this.dropRetry(answer);
      return;
    }
    this.#retries.set(answer, done + 1);
    this.#again(answer);
  }

  /** @param {Message} answer */
  dropRetry(answer) {
    answer.retryAt = null;
    this.#view.showMessage(answer);
  }

  /** Which of its siblings a message is: the place of its version, and all of them. @param {Message} message */
  versionsOf(message) {
    const versions = siblingsOf(this.current.messages, message);
    return { versions, at: versions.indexOf(message) };
  }

  /** Shows the branch of this message, down to what was said last there. @param {Message} message */
  choose(message) {
    this.current.tip = newestEnd(this.current.messages, message).id;
    this.#save(this.current);
  }

  stop() {
    this.#runs.get(this.current.id)?.abort();
  }

  /** Of the conversation that is open. @param {?string} prompt  null: that of the settings */
  setSystemPrompt(prompt) {
    this.current.systemPrompt = prompt;
    this.#save(this.current);
  }

  /** @param {Conversation} conversation  @param {string} title */
  rename(conversation, title) {
    conversation.title = title;
    this.#save(conversation);
    this.#view.showList();
  }

  /** Nothing of it is left, here and on the server. @param {Conversation} conversation */
  async remove(conversation) {
    await this.#read(conversation);
    this.#drop(conversation);
    this.#tabs.tell({ removed: conversation.id });
    this.#store.delete(conversation.id).catch(() => this.#view.showUnkept());
    forget(conversation.messages.flatMap(({ responseId }) => responseId ?? []), this.#choices.key());
  }

  /** @param {Conversation} conversation */
  #drop(conversation) {
    conversation.isRead = true; // what is being read of it comes too late
    this.#runs.get(conversation.id)?.abort();
    this.conversations = this.conversations.filter((each) => each !== conversation);
    if (conversation === this.current) this.open(null);
    else this.#view.showList();
  }

  /** Takes over conversations of another browser. @param {Conversation[]} conversations */
  add(conversations) {
    const replaced = new Set(conversations.map(({ id }) => id));
    const kept = this.conversations.filter(({ id }) => !replaced.has(id));
    this.conversations = [...kept, ...conversations].sort((a, b) => b.updated - a.updated);
    for (const each of conversations) this.#save(each, each.messages);
    this.open(this.current.id);
  }

  /** @param {Message} answer */
  #again(answer) {
    if (this.isBusy) return;
    this.#answer(this.current, askAgain(this.current, answer));
  }

  /** @param {Conversation} conversation  @param {Message} answer */
  #answer(conversation, answer) {
    this.#sort();
    this.#run(conversation, answer);
    if (conversation === this.current) this.#view.showConversation(conversation);
  }

  #sort() {
    this.conversations.sort((a, b) => b.updated - a.updated);
  }

  /**
   * @param {Conversation} conversation
   * @param {Message} answer
   * @param {() => Promise<void>} prepare  what comes first when no other tab makes the answer
   */
  async #run(conversation, answer, prepare = async () => {}) {
    const controller = new AbortController();
    const { signal } = controller;
    this.#runs.set(conversation.id, controller);
    await this.#tabs.alone(answer.id, signal, async () => {
      if (!signal.aborted) await prepare();
      if (isRunning(answer)) await this.#make(conversation, answer, signal);
    });
  }

  /**
   * An answer that is not made here is made by another tab, or by none: when that one is gone, it goes on here.
   * @param {Conversation} conversation
   */
  #follow(conversation) {
    const answer = runningIn(conversation);
    if (answer === null || this.#runs.has(conversation.id)) return;
    this.#run(conversation, answer, async () => {
      const messages = await this.#store.messages(conversation.id).catch(() => []);
      this.#takeOver(conversation, { head: conversation, messages });
    });
  }

  /**
   * @param {Conversation} conversation
   * @param {Message} answer
   * @param {AbortSignal} signal
   */
  async #make(conversation, answer, signal) {
    const { key } = this.#choices;
    this.#made.add(answer);
    const question = conversation.messages.filter(({ id }) => id === answer.parent);
    this.#save(conversation, [...question, answer]); // other tabs hear of it when they cannot begin it any more
    await runAnswer(answer, (scope) => this.#request(conversation, answer, scope), {
      signal,
      key: key(),
      onChange: (urgent = false) => this.#changed(conversation, answer, urgent),
    });
    this.#made.delete(answer);
    await this.#save(conversation, [answer]); // the next tab reads it as it ended
  }

  /**
   * @param {Conversation} conversation
   * @param {Message} answer
   * @param {Scope} scope
   */
  async #request(conversation, answer, { isWhole, fit }) {
    const { fields, isKept, systemPrompt } = this.#choices;
    /** @type {WirePath} */
    const path = isKept() ? RESPONSES : CHAT;
    const said = { ...saidBefore(conversation, answer, isWhole || path === CHAT), fit };
    return { path, body: WIRES[path].body(await fields(), said, conversation.systemPrompt ?? systemPrompt()) };
  }

  /**
   * @param {Conversation} conversation
   * @param {Message} answer
   * @param {boolean} urgent
   */
  #changed(conversation, answer, urgent) {
    const ended = !isRunning(answer);
    if (ended) this.#runs.delete(conversation.id);
    this.#view.showMessage(answer);
    if (ended) this.#view.showList();
    else if (urgent) this.#save(conversation, [answer]);
    else this.#saveSoon(conversation, answer);
  }

  /** What a stream brings is kept every second. @param {Conversation} conversation  @param {Message} answer */
  #saveSoon(conversation, answer) {
    if (this.#unsaved.size === 0) setTimeout(() => this.#saveAll(), SAVE_EVERY_MS);
    this.#unsaved.set(conversation, answer);
  }

  #saveAll() {
    for (const [conversation, answer] of this.#unsaved) this.#save(conversation, [answer]);
    this.#unsaved.clear();
  }

  /**
   * A deleted conversation stays deleted, even when its answer ends later.
   * @param {Conversation} conversation
   * @param {Message[]} messages  those that changed
   */
  async #save(conversation, messages = []) {
    const growing = this.#unsaved.get(conversation);
    if (growing !== undefined && messages.includes(growing)) this.#unsaved.delete(conversation);
    if (!this.conversations.includes(conversation)) return;
    this.#tabs.tell({ head: headOf(conversation), messages });
    await this.#store.put(conversation, messages).catch(() => this.#view.showUnkept());
  }

  // What other tabs do.

  /** @param {Told} told */
  async #hear(told) {
    await this.#loading;
    if ("removed" in told) {
      const removed = this.conversations.find(({ id }) => id === told.removed);
      if (removed !== undefined) this.#drop(removed);
      return;
    }
    const { head, messages } = told;
    let known = this.conversations.find(({ id }) => id === head.id);
    if (known === undefined) {
      // The other tab says all that it puts into a new conversation, and of an older one it may have only a part.
      known = { ...head, messages: [], isRead: messages[0]?.parent === null };
      this.conversations.push(known);
    }
    if (head.running) await this.#read(known);
    if (known.isRead) this.#takeOver(known, told);
    else Object.assign(known, head);
    this.#sort();
    this.#follow(known);
    this.#view.showList();
  }

  /** @param {Conversation} conversation  @param {Parameters<typeof takeOver>[1]} theirs */
  #takeOver(conversation, theirs) {
    const before = conversation.tip;
    const changed = takeOver(conversation, theirs, (message) => this.#made.has(message));
    const others = runningIn(conversation) === null ? this.#runs.get(conversation.id) : undefined;
    if (others !== undefined) {
      this.#runs.delete(conversation.id);
      others.abort(); // nothing is left to wait for
    }
    for (const message of changed) this.#view.showMessage(message);
    if (conversation !== this.current) return;
    if (conversation.tip === before) this.#view.showVersions();
    else this.#view.showConversation(conversation);
  }
}
