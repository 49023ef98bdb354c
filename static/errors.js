/**
 * The card that says why an answer did not come, and when to try again.
 *
 * @import { Fault } from "./conversation.js"
 *
 * @typedef {object} ErrorActions
 * @property {() => void} retry
 * @property {() => void} retryAutomatically
 * @property {() => void} dropRetry
 * @property {() => void} askForKey
 * @property {() => void} newConversation
 */

import { el, icon } from "./dom.js";

const TICK_MS = 250;

/** @type {Record<string|number, string>} */
const TITLES = {
  400: "The server did not accept this",
  401: "This server asks for a key",
  404: "The model is not there",
  413: "That is too long",
  429: "You have reached your limit",
  503: "The server is busy",
  failed: "The answer broke off",
  lost: "Connection lost",
  unreachable: "The server cannot be reached",
  gone: "The rest of this answer is gone",
};

const BUTTONS = {
  retry: { label: "Try again", class: "primary" },
  key: { label: "Enter key", class: "primary" },
  fresh: { label: "New conversation", class: "primary" },
  wait: { label: "Do not retry", class: "quiet" },
};

/**
 * @param {Fault} error
 * @param {?number} retryAt  epoch in ms of the automatic retry
 * @param {ErrorActions} actions
 * @returns {{element: Element, dispose: () => void}}
 */
export function errorCard(error, retryAt, actions) {
  const waiting = retryAt !== null && retryAt > Date.now();
  const countdown = el("p", { class: "countdown", "aria-live": "off", hidden: !waiting });
  const element = el(
    "div",
    { class: `card ${isPassing(error) ? "passing" : "lasting"}`, role: "alert" },
    icon("alert"),
    el("div", { class: "card-text" }, el("h3", {}, titleOf(error)), el("p", {}, error.message), countdown),
    el("div", { class: "card-actions" }, ...buttons(error, waiting, actions)),
  );
  const stop = waiting ? countDown(countdown, retryAt, actions.retryAutomatically) : () => {};
  return { element, dispose: stop };
}

/** @param {Fault} error */
function titleOf({ kind, status, code }) {
  if (code === "context_length_exceeded") return "The conversation is too long for this model";
  return TITLES[status] ?? TITLES[kind] ?? "The server made a mistake";
}

/** What goes by with time, as opposed to what the user has to change. @param {Fault} error */
function isPassing({ kind, status }) {
  return kind === "lost" || kind === "gone" || status === 429 || status === 503;
}

/**
 * @param {Fault} error
 * @param {boolean} waiting
 * @param {ErrorActions} actions
 */
function buttons({ status, code }, waiting, actions) {
  if (status === 401) return [button("key", actions.askForKey)];
  if (code === "context_length_exceeded") return [button("fresh", actions.newConversation)];
  const retry = button("retry", actions.retry);
  return waiting ? [retry, button("wait", actions.dropRetry)] : [retry];
}

/** @param {keyof typeof BUTTONS} name  @param {() => void} onclick */
function button(name, onclick) {
  const { label, class: look } = BUTTONS[name];
  return el("button", { type: "button", class: look, onclick }, label);
}

/**
 * @param {Element} node
 * @param {number} deadline
 * @param {() => void} onEnd
 */
function countDown(node, deadline, onEnd) {
  const tick = () => {
    const left = deadline - Date.now();
    if (left <= 0) {
      clearInterval(timer);
      onEnd();
      return;
    }
    node.textContent = `Trying again in ${Math.ceil(left / 1000)} s`;
  };
  const timer = setInterval(tick, TICK_MS);
  tick();
  return () => clearInterval(timer);
}
