/** The card that says why an answer did not come, and when to try again. */

import { el, icon } from "./dom.js";

const TICK_MS = 250;

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
 * @param {import("./conversation.js").Message} message  that failed
 * @param {object} actions  retry(), retryAutomatically(), dropRetry(), askForKey(), newConversation()
 * @returns {{element: Element, dispose: () => void}}
 */
export function errorCard(message, actions) {
  const { error, retryAt } = message;
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

function titleOf({ kind, status, code }) {
  if (code === "context_length_exceeded") return "The conversation is too long for this model";
  return TITLES[status] ?? TITLES[kind] ?? "The server made a mistake";
}

/** What goes by with time, as opposed to what the user has to change. */
function isPassing({ kind, status }) {
  return kind === "lost" || kind === "gone" || status === 429 || status === 503;
}

function buttons({ status, code }, waiting, actions) {
  if (status === 401) return [button("key", actions.askForKey)];
  if (code === "context_length_exceeded") return [button("fresh", actions.newConversation)];
  const retry = button("retry", actions.retry);
  return waiting ? [retry, button("wait", actions.dropRetry)] : [retry];
}

function button(name, onclick) {
  const { label, class: look } = BUTTONS[name];
  return el("button", { type: "button", class: look, onclick }, label);
}

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
