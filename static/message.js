/** One message on the page. */

import { copyButton } from "./clipboard.js";
import { RECONNECTING, isRunning } from "./conversation.js";
import { el, iconButton } from "./dom.js";
import { errorCard } from "./errors.js";
import { MarkdownView } from "./markdown.js";
import { duration, statsLine } from "./stats.js";

const ENDINGS = {
  stopped: { label: "stopped", hint: "This answer was stopped before its end" },
  length: { label: "cut at the token limit", hint: "finish_reason: length" },
};

/** What the user wrote, exactly as written. */
export class QuestionView {
  /** @param {{onEdit: () => void}} actions */
  constructor(message, { onEdit }) {
    const actions = el(
      "div",
      { class: "actions" },
      copyButton("Copy message", () => message.text),
      iconButton("edit", "Edit message", onEdit),
    );
    const bubble = el("div", { class: "bubble" }, message.text);
    this.element = el("article", { class: "question", "aria-label": "You" }, bubble, actions);
  }

  update() {}

  dispose() {}
}

/** An answer: it waits, streams, ends, or fails. */
export class AnswerView {
  #message;
  #actions;
  #body;
  #text = el("div", { class: "text" });
  #markdown = new MarkdownView(this.#text);
  #pipe = el("div", { class: "pipe", "aria-hidden": "true" });
  #stats = el("p", { class: "stats" });
  #buttons;
  #card = null;
  #shown = ""; // state and retryAt as the page shows them
  #waitingSince = performance.now();

  /** @param {object} actions  those of errorCard, which call for a retry of this very answer */
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#body = el("div", { class: "body" }, this.#text, this.#pipe);
    this.#buttons = el(
      "div",
      { class: "actions" },
      copyButton("Copy answer", () => message.text),
      iconButton("again", "Answer again", actions.retry),
    );
    const foot = el("footer", { class: "answer-meta" }, this.#stats, this.#buttons);
    this.element = el("article", { id: `answer-${message.id}`, class: "answer", "aria-label": "Answer" }, this.#body, foot);
    this.update();
  }

  /** Brings the page up to the message's state. */
  update() {
    const { state, text, retryAt } = this.#message;
    this.#markdown.update(text);
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

  dispose() {
    this.#card?.dispose();
  }

  #enter(state) {
    if (state === "waiting") this.#waitingSince = performance.now();
    this.element.dataset.state = state;
    const running = isRunning(this.#message);
    this.element.setAttribute("aria-busy", String(running));
    this.#pipe.hidden = !running;
    this.#buttons.hidden = running || state === "failed";
    this.#card?.dispose();
    this.#card?.element.remove();
    this.#card = state === "failed" ? errorCard(this.#message, this.#actions) : null;
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
    const label = `waiting ${duration(Math.floor(waited / 1000) * 1000).replace(".0", "")}`;
    return [{ label, hint: "For the first token" }];
  }

  #ownLine() {
    const { stats, state } = this.#message;
    const ending = ENDINGS[state === "stopped" ? "stopped" : stats?.finish];
    const shown = stats !== null && stats.tokens > 0 ? statsLine(stats) : [];
    return ending ? [ending, ...shown] : shown;
  }
}
