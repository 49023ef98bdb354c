/** The conversation on the page, and the rule for when it scrolls by itself. */

import { isRunning } from "./conversation.js";
import { tellAnswer } from "./hooks.js";
import { AnswerView, QuestionView } from "./message.js";

const TICK_MS = 500;
const PER_FRAME = 8; // messages that are built at once: a long conversation comes into view without a stop
const NEAR_END_PX = 24;

export class Log {
  #scroller;
  #list;
  #jump;
  #actions;
  #views = new Map(); // message -> its view
  #changed = new Set(); // messages that the next frame brings up to date
  #missing = []; // messages that the next frames build views for, in order
  #before = null; // the element that the missing ones come before, null for the end
  #following = true; // the reader is at the end and wants to stay there
  #lastTop = 0;

  /**
   * @param {{scroller: Element, list: Element, jump: Element}} nodes
   * @param {object} actions  by message: retry, retryAutomatically, dropRetry, edit, choose, and versionsOf, which
   *   gives its siblings; and askForKey, newConversation
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

  /**
   * Shows exactly these messages. Views of messages that stay are kept; new ones come a few in a frame, from the end
   * that the reader looks at.
   * @param {?{message: object, step: number}} chosen  the version to stay at, and how it was reached; without one the
   *   last message comes into view
   */
  show(messages, chosen = null) {
    const kept = new Set(messages);
    for (const [message, view] of this.#views) if (!kept.has(message)) this.#remove(message, view);
    for (const view of this.#views.values()) view.showVersions();
    this.#missing = messages.filter((message) => !this.#views.has(message));
    this.#before = null;
    this.#following = chosen === null;
    this.#build();
    if (chosen === null) this.follow();
    else this.#views.get(chosen.message)?.focusVersions(chosen.step);
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

  #build() {
    const fromEnd = this.#following;
    const some = fromEnd ? this.#missing.splice(-PER_FRAME) : this.#missing.splice(0, PER_FRAME);
    const views = some.map((message) => [message, this.#viewOf(message)]);
    for (const [message, view] of views) this.#views.set(message, view);
    const elements = views.map(([, view]) => view.element);
    if (this.#before?.isConnected) this.#before.before(...elements);
    else this.#list.append(...elements);
    if (fromEnd) this.#before = elements[0] ?? this.#before;
    for (const message of some) if (message.role === "assistant") tellAnswer(message, "shown");
    if (this.#missing.length > 0) requestAnimationFrame(() => this.#build());
    this.#keepEnd();
  }

  #remove(message, view) {
    view.dispose();
    view.element.remove();
    this.#views.delete(message);
    this.#changed.delete(message);
  }

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
