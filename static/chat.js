/** What the user can do: the conversations, and the answers being made in them. */

import {
  ask,
  askAgain,
  historyBefore,
  isRunning,
  newConversation,
  runningIn,
  settle,
  shownIn,
} from "./conversation.js";
import { runAnswer } from "./run.js";
import { hasFollowers, newestEnd, siblingsOf } from "./tree.js";

const MAX_AUTOMATIC_RETRIES = 3;
const SAVE_EVERY_MS = 1000;

export class Chat {
  conversations = [];
  current = newConversation();
  #store;
  #view;
  #choices;
  #runs = new Map(); // conversation id -> AbortController of its answer
  #retries = new WeakMap(); // answer -> automatic retries since the user last acted
  #savedAt = 0;

  /**
   * @param {object} store  see store.js
   * @param {object} view  showConversation(conversation), showMessage(message), showList(), and
   *   showUnkept(): the browser did not keep a change
   * @param {{request: () => Promise<object>, systemPrompt: () => string, key: () => ?string}} choices  what
   *   goes with each request, read when it is sent
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
  async load() {
    this.conversations = (await this.#store.all()).map((each) => settle(each, Date.now()));
    for (const conversation of this.conversations) {
      const answer = runningIn(conversation);
      if (answer !== null) this.#run(conversation, answer);
    }
  }

  /** @param {?string} id  an unknown one opens an empty conversation */
  open(id) {
    const known = this.conversations.find((each) => each.id === id);
    if (known === undefined && this.current.messages.length > 0) this.current = newConversation();
    if (known !== undefined) this.current = known;
    this.#view.showConversation(this.current);
  }

  /** @param {?object} edited  the user's message that the text is another version of: a branch of its own */
  send(text, edited = null) {
    if (this.isBusy) return;
    const conversation = this.current;
    const answer = edited === null ? ask(conversation, text) : ask(conversation, text, edited.parent);
    if (!this.conversations.includes(conversation)) this.conversations.push(conversation);
    this.#answer(conversation, answer);
  }

  /** Another answer to the same question. */
  retry(answer) {
    this.#retries.delete(answer);
    this.#again(answer);
  }

  retryAutomatically(answer) {
    const done = this.#retries.get(answer) ?? 0;
    if (done >= MAX_AUTOMATIC_RETRIES || hasFollowers(this.current.messages, answer)) {
      this.dropRetry(answer);
      return;
    }
    this.#retries.set(answer, done + 1);
    this.#again(answer);
  }

  dropRetry(answer) {
    answer.retryAt = null;
    this.#view.showMessage(answer);
  }

  /** Which of its siblings a message is: the place of its version, and all of them. */
  versionsOf(message) {
    const versions = siblingsOf(this.current.messages, message);
    return { versions, at: versions.indexOf(message) };
  }

  /** Shows the branch of this message, down to what was said last there. */
  choose(message) {
    this.current.tip = newestEnd(this.current.messages, message).id;
    this.#save(this.current);
  }

  stop() {
    this.#runs.get(this.current.id)?.abort();
  }

  rename(conversation, title) {
    conversation.title = title;
    this.#save(conversation);
    this.#view.showList();
  }

  remove(conversation) {
    this.#runs.get(conversation.id)?.abort();
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.#store.delete(conversation.id).catch(() => this.#view.showUnkept());
    if (conversation === this.current) this.open(null);
    else this.#view.showList();
  }

  /** Takes over conversations of another browser. */
  add(conversations) {
    const replaced = new Set(conversations.map(({ id }) => id));
    const kept = this.conversations.filter(({ id }) => !replaced.has(id));
    this.conversations = [...kept, ...conversations].sort((a, b) => b.updated - a.updated);
    for (const each of conversations) this.#save(each);
    this.open(this.current.id);
  }

  #again(answer) {
    if (this.isBusy) return;
    this.#answer(this.current, askAgain(this.current, answer));
  }

  #answer(conversation, answer) {
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.#run(conversation, answer);
    if (conversation === this.current) this.#view.showConversation(conversation);
    this.#save(conversation);
  }

  async #run(conversation, answer) {
    const controller = new AbortController();
    this.#runs.set(conversation.id, controller);
    const { request, systemPrompt, key } = this.#choices;
    const messages = historyBefore(conversation, answer, systemPrompt());
    await runAnswer(answer, async () => ({ ...(await request()), messages }), {
      signal: controller.signal,
      key: key(),
      onChange: (urgent = false) => this.#changed(conversation, answer, urgent),
    });
  }

  #changed(conversation, answer, urgent) {
    const ended = !isRunning(answer);
    if (ended) this.#runs.delete(conversation.id);
    this.#view.showMessage(answer);
    if (ended) this.#view.showList();
    if (ended || urgent || Date.now() - this.#savedAt > SAVE_EVERY_MS) this.#save(conversation);
  }

  /** A deleted conversation stays deleted, even when its answer ends later. */
  #save(conversation) {
    if (!this.conversations.includes(conversation)) return;
    this.#savedAt = Date.now();
    this.#store.put(conversation).catch(() => this.#view.showUnkept());
  }
}
