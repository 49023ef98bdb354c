/** What the user can do: the conversations, and the answers being made in them. */

import {
  ask,
  askAgain,
  dropFrom,
  historyBefore,
  isRunning,
  newConversation,
  runningIn,
  settle,
} from "./conversation.js";
import { runAnswer } from "./run.js";

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

  get isStreaming() {
    return this.conversations.some((each) => runningIn(each)?.state === "streaming");
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

  /** @param {?object} edited  the user's message that the text replaces, with all that followed it */
  send(text, edited = null) {
    if (this.isBusy) return;
    const conversation = this.current;
    if (edited !== null) dropFrom(conversation, edited);
    const answer = ask(conversation, text);
    if (!this.conversations.includes(conversation)) this.conversations.push(conversation);
    this.#answer(conversation, answer);
  }

  retry(answer) {
    this.#retries.delete(answer);
    this.#again(answer);
  }

  retryAutomatically(answer) {
    const done = this.#retries.get(answer) ?? 0;
    if (done >= MAX_AUTOMATIC_RETRIES) {
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

  #again(answer) {
    if (this.isBusy) return;
    askAgain(this.current, answer);
    this.#answer(this.current, answer);
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
