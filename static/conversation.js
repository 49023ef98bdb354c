/**
 * The model of a conversation: plain data, so that a store can keep it as it is.
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {?string} parent  id of the message that it follows
 * @property {"user"|"assistant"} role
 * @property {string} text
 * @property {string} thinking  what the server told apart of an answer
 * @property {"waiting"|"streaming"|"reconnecting"|"done"|"stopped"|"failed"} state
 * @property {?Fault} error  when failed
 * @property {?number} retryAt  epoch in ms of the automatic retry, null when there is none
 * @property {?Stats} stats
 * @property {?Stream} stream  while it runs
 * @property {?string} requestId  the x-request-id of an answer
 * @property {?string} responseId  under which the server keeps an answer and all that was said before it
 * @property {boolean} [shortened]  of an answer: the model did not see the oldest messages: they did not fit
 *
 * @typedef {Pick<ApiError, "kind"|"message"|"status"|"code">} Fault
 *
 * @typedef {object} Stream  where an answer comes from, for the next connection
 * @property {WirePath} path  that it was asked under
 * @property {string} name  the page's for the request
 * @property {?Body} body  the request, until the id is known
 * @property {?string} id  the server's for the answer
 * @property {number} number  of the last chunk that is in the text, -1 before the first
 *
 * @typedef {object} Head  of a conversation: what is known of it before its messages are read
 * @property {string} id
 * @property {string} title
 * @property {number} updated  epoch, ms
 * @property {?string} tip  id of the last message of the branch that is shown
 * @property {?string} systemPrompt  null: that of the settings
 * @property {boolean} running  an answer is being made
 *
 * @typedef {object} Rest  of a conversation
 * @property {Message[]} messages  all that were ever made, a tree (see tree.js); none before they are read
 * @property {boolean} isRead
 *
 * @typedef {Omit<Head, "running"> & Rest} Conversation
 *
 * @import { ApiError } from "./fault.js"
 * @import { Stats } from "./stats.js"
 * @import { Body, Said, WirePath } from "./wires.js"
 */

import { partsOf } from "./thinking.js";
import { hasFollowers, pathTo } from "./tree.js";

export const RECONNECTING = "Connection lost. Reconnecting…";
const TITLE_LENGTH = 60;
const NAMED_MS = 600_000; // the server knows a request by its name for so long

/** @returns {Conversation} */
export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), tip: null, systemPrompt: null, messages: [], isRead: true };
}

/** @param {Conversation} conversation */
export function isEmpty({ isRead, messages }) {
  return isRead && messages.length === 0;
}

/** @param {Conversation} conversation  @returns {Head} */
export function headOf(conversation) {
  const { id, title, updated, tip, systemPrompt = null, messages } = conversation;
  return { id, title, updated, tip, systemPrompt, running: messages.some(isRunning) };
}

/**
 * @param {Message["role"]} role
 * @param {string} text
 * @param {?string} parent
 * @returns {Message}
 */
export function newMessage(role, text, parent) {
  return {
    id: newId(),
    parent,
    role,
    text,
    thinking: "",
    state: role === "user" ? "done" : "waiting",
    error: null,
    retryAt: null,
    stats: null,
    stream: null,
    requestId: null,
    responseId: null,
    shortened: false,
  };
}

/**
 * Adds what the user said and the place for its answer, which it returns.
 * @param {Conversation} conversation
 * @param {string} text
 * @param {?string} parent  id of the message that this follows: any, and so a new branch, or the last of this one
 */
export function ask(conversation, text, parent = conversation.tip) {
  if (conversation.title === "") conversation.title = titleFrom(text);
  const question = newMessage("user", text, parent);
  conversation.messages.push(question);
  return addAnswer(conversation, question.id);
}

/**
 * The place for another answer to the same question. One that failed, and that nothing follows, gives up its own.
 * @param {Conversation} conversation
 * @param {Message} answer
 * @returns {Message}
 */
export function askAgain(conversation, answer) {
  const { messages } = conversation;
  if (answer.state !== "failed" || hasFollowers(messages, answer)) return addAnswer(conversation, answer.parent);
  Object.assign(answer, { ...newMessage("assistant", "", answer.parent), id: answer.id });
  conversation.tip = answer.id;
  conversation.updated = Date.now();
  return answer;
}

/** @param {Conversation} conversation  @param {?string} parent */
function addAnswer(conversation, parent) {
  const answer = newMessage("assistant", "", parent);
  conversation.messages.push(answer);
  conversation.tip = answer.id;
  conversation.updated = Date.now();
  return answer;
}

/** The branch that is shown. @param {Conversation} conversation */
export function shownIn({ messages, tip }) {
  return pathTo(messages, tip);
}

/**
 * How many tokens the prompt and the answer had when the model was last asked.
 * @param {Message[]} path  a branch
 */
export function tokensOf(path) {
  const last = path.findLast(({ stats }) => stats?.timings?.prompt_tokens);
  return last?.stats ? (last.stats.timings?.prompt_tokens ?? 0) + last.stats.tokens : 0;
}

/**
 * What the server is sent for an answer: all that was said before it, or what is new since the last response that it
 * keeps.
 * @param {Conversation} conversation
 * @param {Message} answer
 * @param {boolean} isWhole  all of it
 * @returns {Omit<Said, "fit">}
 */
export function saidBefore(conversation, answer, isWhole) {
  const path = pathTo(conversation.messages, answer.parent);
  const last = isWhole ? -1 : path.findLastIndex(({ responseId }) => responseId);
  const said = path.slice(last + 1).filter(({ text }) => text !== "");
  const messages = said.map((message) => ({ role: message.role, content: contentOf(message) }));
  return { previous: path[last]?.responseId ?? null, messages };
}

/**
 * What a model thought before it answered is not for the next turn: its makers train it without.
 * @param {Message} message
 */
function contentOf(message) {
  return message.role === "assistant" ? partsOf(message).answer : message.text;
}

/**
 * Messages that were stored, of a conversation whose page was closed: an answer that ran goes on if it is known where.
 * One that was stored without branches has one.
 * @param {Conversation} conversation
 * @param {number} now  epoch, ms
 */
export function settle(conversation, now) {
  const { messages, updated } = conversation;
  if (conversation.tip === undefined) {
    for (const [at, message] of messages.entries()) message.parent = messages[at - 1]?.id ?? null;
    conversation.tip = messages.at(-1)?.id ?? null;
  }
  for (const message of messages) {
    message.stream ??= null;
    message.thinking ??= "";
    message.responseId ??= null;
    const known = message.stream !== null && (message.stream.id !== null || now - updated < NAMED_MS);
    if (isRunning(message) && !known) message.state = "stopped";
    message.retryAt = null;
  }
  return conversation;
}

/**
 * Takes over what another tab made of the same conversation. A reader stays on the branch that is shown here.
 * @param {Conversation} conversation
 * @param {{head: Omit<Head, "running">, messages: Message[]}} theirs  messages: those that changed
 * @param {(message: Message) => boolean} isOurs  this tab makes it
 * @returns {Message[]} those that were here and have changed
 */
export function takeOver(conversation, { head, messages }, isOurs) {
  const here = new Map(conversation.messages.map((each) => [each.id, each]));
  const seen = /** @type {const} */ (["text", "thinking", "state"]);
  const changed = [];
  for (const each of messages) {
    const message = { ...each, retryAt: null }; // that tab tries again, and this one does not
    const own = here.get(message.id);
    if (own === undefined) conversation.messages.push(message);
    else if (!isOurs(own)) {
      if (seen.some((name) => own[name] !== message[name])) changed.push(own);
      Object.assign(own, message);
    }
  }
  const { title, updated, systemPrompt, tip } = head;
  Object.assign(conversation, { title, updated, systemPrompt });
  const goesOn = pathTo(conversation.messages, tip).some(({ id }) => id === conversation.tip);
  if (goesOn) conversation.tip = tip;
  return changed;
}

/**
 * @param {Conversation} conversation
 * @returns {?Message} the answer that is being made
 */
export function runningIn(conversation) {
  return conversation.messages.find(isRunning) ?? null;
}

/** @param {Message} message */
export function isRunning(message) {
  return ["waiting", "streaming", "reconnecting"].includes(message.state);
}

/** The first line, cut between words. @param {string} text */
export function titleFrom(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  if (line.length <= TITLE_LENGTH) return line;
  const space = line.lastIndexOf(" ", TITLE_LENGTH);
  return `${line.slice(0, space > TITLE_LENGTH / 2 ? space : TITLE_LENGTH)}…`;
}

/** crypto.randomUUID exists only on https and localhost; this works on a LAN address too. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
