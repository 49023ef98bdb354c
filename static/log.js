/**
 * The conversation on the page, and the rule for when it scrolls by itself.
 *
 * @import { Message } from "./conversation.js"
 *
 * @typedef {object} LogActions
 * @property {(answer: Message) => void} retry
 * @property {(answer: Message) => void} retryAutomatically
 * @property {(answer: Message) => void} dropRetry
 * @property {(question: Message) => void} edit
 * @property {(message: Message, step: number) => void} choose
 * @property {(message: Message) => {versions: Message[], at: number}} versionsOf
 * @property {() => void} askForKey
 * @property {() => void} openSettings
 * @property {() => void} newConversation
 *
 * @typedef {AnswerView|QuestionView} View
 */

import { isRunning } from "./conversation.js";
import { byId } from "./dom.js";
import { tellAnswer } from "./hooks.js";
import { AnswerView, QuestionView } from "./message.js";

const TICK_MS = 500;
const PER_FRAME = 8; // messages that are built at once: a long conversation comes into view without a stop
const NEAR_END_PX = 24;

const [scroller, list, jump] = ["scroller", "messages", "jump"].map(byId);

export class Log {
  #actions;
  /** @type {Map<Message, View>} */
  #views = new Map();
  /** @type {Set<Message>} that the next frame brings up to date */
  #changed = new Set();
  /** @type {Message[]} that are shown, in order */
  #path = [];
  /** @type {Message[]} those of them that the next frames build views for, in order */
  #missing = [];
  #fromEnd = true; // which of these come first
  #following = true; // the reader is at the end and wants to stay there
  #lastTop = 0;

  /** @param {LogActions} actions */
  constructor(actions) {
    this.#actions = actions;
    scroller.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    jump.addEventListener("click", () => this.follow());
    const sizes = new ResizeObserver(() => this.#keepEnd());
    sizes.observe(scroller);
    sizes.observe(list);
    setInterval(() => this.#tick(), TICK_MS);
  }

  /**
   * Shows exactly these messages. Views of messages that stay are kept; new ones come a few in a frame, from the end
   * that the reader looks at.
   * @param {Message[]} messages
   * @param {?{message: Message, step: number}} chosen  the version to stay at, and how it was reached; without one the
   *   last message comes into view
   */
  show(messages, chosen = null) {
    const kept = new Set(messages);
    for (const [message, view] of this.#views) if (!kept.has(message)) this.#remove(message, view);
    this.showVersions();
    this.#path = messages;
    this.#missing = messages.filter((message) => !this.#views.has(message));
    this.#fromEnd = this.#following = chosen === null;
    this.#buildSome();
    if (chosen !== null) this.#views.get(chosen.message)?.focusVersions(chosen.step);
  }

  showVersions() {
    for (const view of this.#views.values()) view.showVersions();
  }

  /**
   * The first text and the end of an answer show at once, what is between at the next frame.
   * @param {Message} message
   */
  update(message) {
    const view = this.#views.get(message);
    if (view === undefined) return;
    if (view.element.dataset.state !== message.state) this.#draw([message]);
    else if (this.#changed.add(message).size === 1) requestAnimationFrame(() => this.#drawChanged());
  }

  follow() {
    this.#following = true;
    this.#keepEnd();
  }

  #buildSome() {
    const some = this.#fromEnd ? this.#missing.splice(-PER_FRAME) : this.#missing.splice(0, PER_FRAME);
    for (const message of some.reverse()) this.#add(message);
    if (this.#missing.length > 0) requestAnimationFrame(() => this.#buildSome());
    else if (this.#left < 1) this.#following = true;
    this.#keepEnd();
  }

  /**
   * Puts it before the view of what follows it, which is there already or comes at the end.
   * @param {Message} message
   */
  #add(message) {
    const view = this.#viewOf(message);
    const next = this.#views.get(this.#path[this.#path.indexOf(message) + 1]);
    list.insertBefore(view.element, next?.element ?? null);
    this.#views.set(message, view);
    if (message.role === "assistant") tellAnswer(message, "shown");
  }

  /** @param {Message} message  @param {View} view */
  #remove(message, view) {
    view.dispose();
    view.element.remove();
    this.#views.delete(message);
    this.#changed.delete(message);
  }

  /** @param {Message} message */
  #viewOf(message) {
    const { retry, retryAutomatically, dropRetry, edit, choose, versionsOf, ...others } = this.#actions;
    const versions = { versionsOf: () => versionsOf(message), choose };
    if (message.role === "user") return new QuestionView(message, { edit: () => edit(message), ...versions });
    return new AnswerView(message, {
      ...others,
      ...versions,
      retry: () => retry(message),
      retryAutomatically: () => retryAutomatically(message),
      dropRetry: () => dropRetry(message),
    });
  }

  #drawChanged() {
    this.#draw([...this.#changed]);
    this.#changed.clear();
  }

  /** @param {Message[]} messages */
  #draw(messages) {
    for (const message of messages) this.#views.get(message)?.update();
    this.#keepEnd();
  }

  #tick() {
    for (const [message, view] of this.#views) {
      if (view instanceof AnswerView && isRunning(message)) view.showStats();
    }
  }

  /** How much there is below what is seen, in px. */
  get #left() {
    const { scrollTop, scrollHeight, clientHeight } = scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  #keepEnd() {
    if (this.#following) scroller.scrollTop = scroller.scrollHeight;
    this.#lastTop = scroller.scrollTop;
    jump.hidden = this.#following;
  }

  /** Scrolling up, away from the end, stops following; coming near the end takes it up again. */
  #noticeScroll() {
    const { scrollTop } = scroller;
    if (scrollTop < this.#lastTop) this.#following = this.#left < 1; // shorter content ends at its end
    else if (this.#left < NEAR_END_PX) this.#following = true;
    this.#lastTop = scrollTop;
    jump.hidden = this.#following;
  }
}
