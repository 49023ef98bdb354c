/**
 * The tabs of one browser: each tells the others what it changed, and an answer is made in one of them.
 *
 * @import { Head, Message } from "./conversation.js"
 *
 * @typedef {{head: Head, messages: Message[]}|{removed: string}} Told  messages: those that changed; removed: a
 *   conversation's id
 */

export class Tabs {
  #channel = new BroadcastChannel("penstock");

  /** @param {(told: Told) => void} onTold  what another tab told */
  constructor(onTold) {
    this.#channel.onmessage = ({ data }) => onTold(data);
  }

  /** @param {Told} told */
  tell(told) {
    this.#channel.postMessage(told);
  }

  /**
   * Does something when no other tab does what has this name; at once if the user does not wait (the signal), and in a
   * browser that has no locks, which needs https or localhost.
   * @param {string} name
   * @param {AbortSignal} signal
   * @param {() => Promise<void>} act
   */
  async alone(name, signal, act) {
    if (!navigator.locks) return act();
    return navigator.locks.request(name, { signal }, act).catch((fault) => {
      if (fault.name !== "AbortError") throw fault;
      return act();
    });
  }
}
