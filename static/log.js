/** The conversation on the page, and the rule for when it scrolls by itself. */

import { isRunning } from "./conversation.js";
import { tellAnswer } from "./hooks.js";
import { AnswerView, QuestionView } from "./message.js";

const TICK_MS = 500;
const NEAR_END_PX = 24;

export class Log {
  #scroller;
  #list;
  #jump;
  #actions;
  #views = new Map(); // message -> its view
  #changed = new Set(); // messages that the next frame brings up to date
  #following = true; // the reader is at the end and wants to stay there
  #lastTop = 0;

  /**
   * @param {{scroller: Element, list: Element, jump: Element}} nodes
   * @param {object} actions  by message: retry, retryAutomatically, dropRetry, edit; and
   *   askForKey, newConversation
   */
  constructor({ scroller, list, jump }, actions) {
    this.#scroller = scroller;
    this.#list = list;
    this.#jump = jump;
    this.#actions = actions;
    scroller.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    jump.addEventListener("click", () => this.follow());
    const sizes = new ResizeObserver(() => this.#keepEnd());
    sizes.observe(scroller);
    sizes.observe(list);
    setInterval(() => this.#tick(), TICK_MS);
  }

  /** Shows exactly these messages. Views of messages that stay are kept. */
  show(messages) {
    const kept = new Set(messages);
    for (const [message, view] of this.#views) if (!kept.has(message)) this.#remove(message, view);
    for (const message of messages) if (!this.#views.has(message)) this.#add(message);
    this.follow();
  }

  /** The first text and the end of an answer show at once, what is between at the next frame. */
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

  #add(message) {
    const view = this.#viewOf(message);
    this.#views.set(message, view);
    this.#list.append(view.element);
    if (message.role === "assistant") tellAnswer(message, "shown");
  }

  #remove(message, view) {
    view.dispose();
    view.element.remove();
    this.#views.delete(message);
    this.#changed.delete(message);
  }

  #viewOf(message) {
    const { retry, retryAutomatically, dropRetry, edit, ...others } = this.#actions;
    if (message.role === "user") return new QuestionView(message, { onEdit: () => edit(message) });
    return new AnswerView(message, {
      ...others,
      retry: () => retry(message),
      retryAutomatically: () => retryAutomatically(message),
      dropRetry: () => dropRetry(message),
    });
  }

  #drawChanged() {
    this.#draw([...this.#changed]);
    this.#changed.clear();
  }

  #draw(messages) {
    for (const message of messages) this.#views.get(message)?.update();
    this.#keepEnd();
  }

  #tick() {
    for (const [message, view] of this.#views) if (isRunning(message)) view.showStats();
  }

  #keepEnd() {
    if (this.#following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop;
    this.#jump.hidden = this.#following;
  }

  /** Scrolling up, away from the end, stops following; coming near the end takes it up again. */
  #noticeScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const left = scrollHeight - scrollTop - clientHeight;
    if (scrollTop < this.#lastTop) this.#following = left < 1; // shorter content ends at its end
    else if (left < NEAR_END_PX) this.#following = true;
    this.#lastTop = scrollTop;
    this.#jump.hidden = this.#following;
  }
}
