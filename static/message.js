/**
 * One message on the page.
 *
 * @import { Message } from "./conversation.js"
 * @import { ErrorActions } from "./errors.js"
 *
 * @typedef {object} VersionActions
 * @property {() => {versions: Message[], at: number}} versionsOf
 * @property {(message: Message, step: number) => void} choose
 */

import { copyButton } from "./clipboard.js";
import { RECONNECTING, isRunning } from "./conversation.js";
import { el, iconButton } from "./dom.js";
import { errorCard } from "./errors.js";
import { MarkdownView } from "./markdown.js";
import { statsLine } from "./stats.js";
import { partsOf } from "./thinking.js";

/** @type {Record<string, {label: string, hint: string}>} */
const ENDINGS = {
  stopped: { label: "stopped", hint: "This answer was stopped before its end" },
  length: { label: "cut at the token limit", hint: "finish_reason: length" },
};

const SHORTENED = {
  label: "without the oldest messages",
  hint: "The conversation is longer than the model's context: it did not see the oldest messages",
};

/** Which of its versions a message is, and the way to the others. Hidden while there is one. */
class VersionsView {
  element = el("div", { class: "versions", role: "group", "aria-label": "Versions" });
  #actions;
  #buttons;
  #place = el("span", {});

  /** @param {VersionActions} actions */
  constructor(actions) {
    this.#actions = actions;
    this.#buttons = [
      iconButton("left", "Previous version", () => this.#go(-1)),
      iconButton("right", "Next version", () => this.#go(1)),
    ];
    this.element.append(this.#buttons[0], this.#place, this.#buttons[1]);
    this.show();
  }

  show() {
    const { versions, at } = this.#actions.versionsOf();
    this.element.hidden = versions.length < 2;
    this.#place.textContent = `${at + 1} of ${versions.length}`;
    this.#buttons[0].disabled = at === 0;
    this.#buttons[1].disabled = at === versions.length - 1;
  }

  /**
   * The button that was pressed is gone with its version: the same one of this version takes the focus.
   * @param {number} step
   */
  focus(step) {
    const [previous, next] = this.#buttons;
    const wanted = step < 0 ? previous : next;
    (wanted.disabled ? (step < 0 ? next : previous) : wanted).focus();
  }

  /** @param {number} step */
  #go(step) {
    const { versions, at } = this.#actions.versionsOf();
    this.#actions.choose(versions[at + step], step);
  }
}

/** What the user wrote, exactly as written. */
export class QuestionView {
  #versions;

  /** @param {Message} message  @param {{edit: () => void} & VersionActions} actions */
  constructor(message, { edit, ...versions }) {
    this.#versions = new VersionsView(versions);
    const actions = el(
      "div",
      { class: "actions" },
      this.#versions.element,
      copyButton("Copy message", () => message.text),
      iconButton("edit", "Edit message", edit),
    );
    const bubble = el("div", { class: "bubble" }, message.text);
    this.element = el("article", { class: "question", "aria-label": "You" }, bubble, actions);
  }

  update() {}

  showVersions() {
    this.#versions.show();
  }

  /** @param {number} step */
  focusVersions(step) {
    this.#versions.focus(step);
  }

  dispose() {}
}

/** What a model thinks before it answers: folded away, for those who want to see it. */
class ThinkingView {
  #summary = el("summary", {});
  #text = document.createTextNode("");
  element = el("details", { class: "thinking", hidden: true }, this.#summary, el("div", {}, this.#text));

  /** @param {string} thinking  @param {boolean} isThinking */
  update(thinking, isThinking) {
    this.element.hidden = thinking === "" && !isThinking;
    const label = isThinking ? "Thinking…" : "Thoughts";
    if (this.#summary.textContent !== label) this.#summary.textContent = label;
    if (this.#text.data === thinking) return;
    if (thinking.startsWith(this.#text.data)) this.#text.appendData(thinking.slice(this.#text.data.length));
    else this.#text.data = thinking;
  }
}

/** An answer: it waits, streams, ends, or fails. */
export class AnswerView {
  #message;
  #actions;
  #body;
  #thinking = new ThinkingView();
  #text = el("div", { class: "text" });
  #markdown = new MarkdownView(this.#text);
  #pipe = el("div", { class: "pipe", "aria-hidden": "true" });
  #stats = el("p", { class: "stats" });
  #buttons;
  #versions;
  /** @type {?ReturnType<typeof errorCard>} */
  #card = null;
  #shown = ""; // state and retryAt as the page shows them
  #waitingSince = performance.now();

  /** @param {Message} message  @param {ErrorActions & VersionActions} actions */
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#body = el("div", { class: "body" }, this.#thinking.element, this.#text, this.#pipe);
    this.#versions = new VersionsView(actions);
    this.#buttons = el(
      "div",
      { class: "actions" },
      copyButton("Copy answer", () => partsOf(message).answer),
      iconButton("again", "Answer again", actions.retry),
    );
    const foot = el("footer", { class: "answer-meta" }, this.#stats, this.#versions.element, this.#buttons);
    this.element = el("article", { id: `answer-${message.id}`, class: "answer", "aria-label": "Answer" }, this.#body, foot);
    this.update();
  }

  /** Brings the page up to the message's state. */
  update() {
    const { state, retryAt } = this.#message;
    const { thinking, answer, isThinking } = partsOf(this.#message);
    this.#thinking.update(thinking, isThinking && isRunning(this.#message));
    this.#markdown.update(answer);
    if (this.#shown !== `${state} ${retryAt}`) this.#enter(state);
    this.#shown = `${state} ${retryAt}`;
    this.showStats();
  }

  /** Called between changes too: while an answer waits, its waiting time is what changes. */
  showStats() {
    const parts = this.#line();
    const spans = parts.map(({ label, hint }) => el("span", { title: hint }, label));
    this.#stats.replaceChildren(...spans);
  }

  showVersions() {
    this.#versions.show();
  }

  /** @param {number} step */
  focusVersions(step) {
    this.#versions.focus(step);
  }

  dispose() {
    this.#card?.dispose();
  }

  /** @param {Message["state"]} state */
  #enter(state) {
    if (state === "waiting") this.#waitingSince = performance.now();
    const { error, retryAt } = this.#message;
    this.element.dataset.state = state;
    const running = isRunning(this.#message);
    this.element.setAttribute("aria-busy", String(running));
    this.#pipe.hidden = !running;
    this.#buttons.hidden = running || state === "failed";
    this.#card?.dispose();
    this.#card?.element.remove();
    this.#card = error !== null && state === "failed" ? errorCard(error, retryAt, this.#actions) : null;
    if (this.#card) this.#body.append(this.#card.element);
  }

  #line() {
    const { state } = this.#message;
    if (state === "reconnecting") return [{ label: RECONNECTING, hint: "The answer goes on from here" }];
    return state === "waiting" ? this.#waitingLine() : this.#ownLine();
  }

  #waitingLine() {
    const waited = performance.now() - this.#waitingSince;
    if (waited < 1000) return [];
    return [{ label: `waiting ${Math.floor(waited / 1000)} s`, hint: "For the first token" }];
  }

  #ownLine() {
    const { stats, state, shortened } = this.#message;
    const ending = ENDINGS[state === "stopped" ? "stopped" : (stats?.finish ?? "")];
    const shown = stats !== null && stats.tokens > 0 ? statsLine(stats) : [];
    return [...(shortened ? [SHORTENED] : []), ...(ending ? [ending] : []), ...shown];
  }
}
