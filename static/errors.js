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
 * @property {() => void} openSettings
 * @property {() => void} newConversation
 */

import { el, icon } from "./dom.js";

const TICK_MS = 250;

/** @type {Record<string|number, string>} by an error's code, else its status, else its kind */
const TITLES = {
  context_length_exceeded: "The conversation is too long for this model",
  service_tier_not_allowed: "Your key does not allow this lane",
  conversation_locked: "Another request is using this conversation",
  host_not_allowed: "The server does not answer at this address",
  store_unavailable: "The server cannot reach its storage",
  server_shutting_down: "The server is restarting",
  400: "The server did not accept this",
  401: "This server asks for a key",
  403: "Your key does not allow this",
  404: "The model is not there",
  405: "The server does not offer this",
  408: "The request took too long to arrive",
  409: "Another request is in the way",
  413: "That is too long",
  415: "The server cannot read this kind of request",
  421: "The server does not answer at this address",
  422: "The server did not accept this",
  429: "You have reached your limit",
  431: "The key or the address is too long",
  500: "The server made a mistake",
  501: "The server does not offer this",
  502: "The server cannot be reached",
  503: "The server is busy",
  504: "The server did not answer in time",
  failed: "The answer broke off",
  lost: "Connection lost",
  unreachable: "The server cannot be reached",
  gone: "The rest of this answer is gone",
};
// Statuses that pass without a change by the user.
const PASSING = [408, 409, 429, 502, 503, 504];

const BUTTONS = {
  retry: { label: "Try again", class: "primary" },
  key: { label: "Enter key", class: "primary" },
  lane: { label: "Choose a lane", class: "primary" },
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
    { class: `card ${needsTime(error) ? "passing" : "lasting"}`, role: "alert" },
    icon("alert"),
    el("div", { class: "card-text" }, el("h3", {}, titleOf(error)), el("p", {}, error.message), countdown),
    el("div", { class: "card-actions" }, ...buttons(error, waiting, actions)),
  );
  const stop = waiting ? countDown(countdown, retryAt, actions.retryAutomatically) : () => {};
  return { element, dispose: stop };
}

/** @param {Fault} error */
export function titleOf({ kind, status, code }) {
  const unknown = status < 500 ? TITLES[400] : TITLES[500];
  return TITLES[code ?? ""] ?? TITLES[status] ?? (status === 0 ? TITLES[kind] : unknown);
}

/** It needs time, as opposed to a change by the user. @param {Fault} error */
function needsTime({ kind, status }) {
  return kind === "lost" || kind === "gone" || PASSING.includes(status);
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
  if (code === "service_tier_not_allowed") return [button("lane", actions.openSettings), retry];
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
