/**
 * Conversations as a file: what the page exports, and what it takes back from anybody's disk.
 *
 * @import { Conversation, Message } from "./conversation.js"
 * @import { Stats } from "./stats.js"
 */

/**
 * @template T
 * @typedef {{[K in keyof T]?: unknown}} Unread  what stands in a file where a T should be
 */

import { isRunning, shownIn, titleFrom } from "./conversation.js";
import { partsOf } from "./thinking.js";

const FORMAT = "penstock.conversations";
const ID = /^[\w-]{1,64}$/;
const MOST_MESSAGES = 20_000;

/** @param {Conversation[]} conversations */
export function exportText(conversations) {
  const kept = conversations.map(({ id, title, updated, tip, systemPrompt, messages }) => {
    return { id, title, updated, tip, systemPrompt, messages: messages.map(exported) };
  });
  return JSON.stringify({ format: FORMAT, version: 1, conversations: kept }, null, 1);
}

/**
 * The branch of a conversation that is shown, for people to read.
 * @param {Conversation} conversation
 */
export function markdownText(conversation) {
  const said = shownIn(conversation).filter(({ text }) => text !== "");
  const parts = said.map((message) =>
    message.role === "user" ? `## You\n\n${message.text}` : `## Answer\n\n${partsOf(message).answer}`,
  );
  return `${[`# ${conversation.title}`, ...parts].join("\n\n")}\n`;
}

/** @param {Message} message */
function exported({ id, parent, role, text, thinking, state, stats }) {
  return { id, parent, role, text, thinking, state: state === "done" ? "done" : "stopped", stats };
}

/**
 * A name for the file that says what is in it.
 * @param {Conversation[]} conversations
 * @param {number} now
 * @param {"json"|"md"} kind
 */
export function exportName(conversations, now, kind = "json") {
  const day = new Date(now).toISOString().slice(0, 10);
  const [only] = conversations.length === 1 ? conversations : [];
  const words = only?.title.toLowerCase().match(/[\p{L}\p{N}]+/gu)?.slice(0, 6);
  return `penstock-${words?.join("-") ?? "conversations"}-${day}.${kind}`;
}

/**
 * @param {string} text  of a file
 * @returns {Conversation[]}
 * @throws {Error} with a message for the user, where it is no export or was damaged
 */
export function readExport(text) {
  const content = parse(text);
  if (content?.format !== FORMAT || !Array.isArray(content.conversations)) {
    throw new Error("This file holds no conversations of Penstock.");
  }
  if (content.version !== 1) throw new Error("This file was written by a later version of Penstock.");
  return content.conversations.map(readConversation);
}

/** @param {string} text */
function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
}

/**
 * @param {?Unread<Conversation>} conversation
 * @param {number} at
 * @returns {Conversation}
 */
function readConversation(conversation, at) {
  const { id, title, updated, tip, systemPrompt, messages } = conversation ?? {};
  /** @type {(fine: boolean) => asserts fine} */
  const check = (fine) => {
    if (!fine) throw new Error(`Conversation ${at + 1} in this file is damaged.`);
  };
  check(isId(id) && isFigure(updated) && Array.isArray(messages));
  check(messages.length > 0 && messages.length <= MOST_MESSAGES);
  /** @type {Set<?string>} */
  const known = new Set([null]);
  /** @type {Message[]} */
  const read = [];
  for (const message of messages) {
    const { id, parent, role, text, ...others } = /** @type {Unread<Message>} */ (message ?? {});
    check(isId(id) && !known.has(id) && (parent === null || isId(parent)) && known.has(parent));
    check((role === "user" || role === "assistant") && typeof text === "string");
    known.add(id);
    read.push(readMessage({ id, parent, role, text }, others));
  }
  const end = read.find((each) => each.id === tip) ?? read[read.length - 1];
  const prompt = typeof systemPrompt === "string" ? systemPrompt : null;
  const name = titleFrom(String(title ?? ""));
  return { id, title: name, updated, tip: end.id, systemPrompt: prompt, messages: read, isRead: true };
}

/**
 * @param {Pick<Message, "id"|"parent"|"role"|"text">} said
 * @param {Unread<Message>} others
 * @returns {Message}
 */
function readMessage(said, { thinking, state, stats }) {
  const ended = said.role === "user" || state === "done" ? "done" : "stopped";
  const none = { error: null, retryAt: null, stream: null, requestId: null, responseId: null };
  const thought = typeof thinking === "string" ? thinking : "";
  return { ...said, thinking: thought, state: ended, stats: readStats(stats), ...none };
}

/**
 * @param {unknown} value
 * @returns {value is string}
 */
function isId(value) {
  return typeof value === "string" && ID.test(value);
}

/**
 * @param {unknown} value
 * @returns {value is number}
 */
function isFigure(value) {
  return Number.isFinite(value);
}

/**
 * Its figures, where they are figures.
 * @param {unknown} given
 * @returns {?Stats}
 */
function readStats(given) {
  const { tokens, ttftMs, tokensPerS, finish, timings } = /** @type {Unread<Stats>} */ (given ?? {});
  if (!isFigure(tokens)) return null;
  const kept = Object.entries(timings ?? {}).filter(([name, value]) => isFigure(value) || name === "lane");
  return {
    sentAt: 0,
    firstAt: null,
    tokens,
    ttftMs: isFigure(ttftMs) ? ttftMs : null,
    tokensPerS: isFigure(tokensPerS) ? tokensPerS : null,
    finish: typeof finish === "string" ? finish : null,
    timings: timings ? Object.fromEntries(kept) : null,
  };
}

/**
 * What of a file is new here: a conversation that is here already is replaced where the file's is later, unless an
 * answer is being made in it.
 * @param {Conversation[]} read
 * @param {Conversation[]} here
 */
export function newIn(read, here) {
  const known = new Map(here.map((each) => [each.id, each]));
  return read.filter(({ id, updated }) => {
    const own = known.get(id);
    return own === undefined || (own.updated < updated && !own.messages.some(isRunning));
  });
}
