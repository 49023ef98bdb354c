/** The dot that says whether the server takes requests. */

import { Live } from "./live.js";

const STATES = ["ready", "loading", "draining", "stalled", "failed", "unreachable"];

/**
 * @param {HTMLElement} node  shows the state as its text and its data-state
 * @param {() => ?string} key
 * @param {() => void} onReady  the server became ready
 * @returns {Live}  not open yet
 */
export function statusOf(node, key, onReady) {
  /** @param {string} state */
  const show = (state) => {
    const shown = STATES.includes(state) ? state : "not ready";
    if (shown === node.dataset.state) return;
    node.dataset.state = node.textContent = shown;
    if (shown === "ready") onReady();
  };
  return new Live("", key, {
    event: ({ data }) => "state" in data && show(data.state),
    lost: () => show("unreachable"),
  });
}
