/**
 * The model of a conversation: plain data, so that a store can keep it as it is.
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {"user"|"assistant"} role
 * @property {string} text
 * @property {"waiting"|"streaming"|"reconnecting"|"done"|"stopped"|"failed"} state
 * @property {?{kind: string, message: string, status: number, code: ?string}} error  when failed
 * @property {?number} retryAt  epoch in ms of the automatic retry, null when there is none
 * @property {?import("./stats.js").Stats} stats
 * @property {?Stream} stream  while it runs
 * @property {?string} requestId  the x-request-id of an answer
 *
 * @typedef {object} Stream  where an answer comes from, for the next connection
 * @property {string} name  the page's for the request
 * @property {?object} body  the request, until the id is known
 * @property {?string} id  the server's for the answer
 * @property {number} number  of the last chunk that is in the text, -1 before the first
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated  epoch, ms
 * @property {Message[]} messages
 */

export const RECONNECTING = "Connection lost. Reconnecting…";
const TITLE_LENGTH = 60;
const NAMED_MS = 600_000; // the server knows a request by its name for so long

/** @returns {Conversation} */
export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), messages: [] };
}

/** @returns {Message} */
export function newMessage(role, text) {
  return {
    id: newId(),
    role,
    text,
    state: role === "user" ? "done" : "waiting",
    error: null,
    retryAt: null,
    stats: null,
    stream: null,
    requestId: null,
  };
}

/** Adds what the user said and the place for its answer, which it returns. */
export function ask(conversation, text) {
  if (conversation.title === "") conversation.title = titleFrom(text);
  const answer = newMessage("assistant", "");
  conversation.messages.push(newMessage("user", text), answer);
  conversation.updated = Date.now();
  return answer;
}

/** Empties an answer, and drops what followed it, so that it can be made again. */
export function askAgain(conversation, answer) {
  dropFrom(conversation, answer);
  conversation.messages.push(answer);
  Object.assign(answer, { ...newMessage("assistant", ""), id: answer.id });
  conversation.updated = Date.now();
}

/** Removes a message and everything after it. */
export function dropFrom(conversation, message) {
  conversation.messages.length = conversation.messages.indexOf(message);
}

/**
 * What the server is sent for an answer: all that was said before it.
 * @returns {{role: string, content: string}[]}
 */
export function historyBefore(conversation, answer, systemPrompt) {
  const before = conversation.messages.slice(0, conversation.messages.indexOf(answer));
  const said = before.filter((message) => message.text !== "");
  const history = said.map(({ role, text }) => ({ role, content: text }));
  return systemPrompt ? [{ role: "system", content: systemPrompt }, ...history] : history;
}

/** A stored conversation whose page was closed: an answer that ran goes on if it is known where. */
export function settle(conversation, now) {
  const { messages, updated } = conversation;
  for (const message of messages) {
    message.stream ??= null;
    const known = message.stream !== null && (message.stream.id !== null || now - updated < NAMED_MS);
    if (isRunning(message) && !known) message.state = "stopped";
    message.retryAt = null;
  }
  return conversation;
}

/** @returns {?Message} the answer that is being made */
export function runningIn(conversation) {
  const last = conversation.messages.at(-1);
  return last !== undefined && isRunning(last) ? last : null;
}

export function isRunning(message) {
  return ["waiting", "streaming", "reconnecting"].includes(message.state);
}

/** The first line, cut between words. */
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
