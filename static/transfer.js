/** Conversations as a file: what the page exports, and what it takes back from anybody's disk. */

import { isRunning, titleFrom } from "./conversation.js";
import { pathTo } from "./tree.js";

const FORMAT = "penstock.conversations";
const ID = /^[\w-]{1,64}$/;
const MOST_MESSAGES = 20_000;

/** @param {import("./conversation.js").Conversation[]} conversations */
export function exportText(conversations) {
  const kept = conversations.map(({ id, title, updated, tip, messages }) => {
    return { id, title, updated, tip, messages: messages.map(exported) };
  });
  return JSON.stringify({ format: FORMAT, version: 1, conversations: kept }, null, 1);
}

function exported({ id, parent, role, text, thinking, state, stats }) {
  return { id, parent, role, text, thinking, state: state === "done" ? "done" : "stopped", stats };
}

/** A name for the file that says what is in it. */
export function exportName(conversations, now) {
  const day = new Date(now).toISOString().slice(0, 10);
  const [only] = conversations.length === 1 ? conversations : [];
  const words = only?.title.toLowerCase().match(/[\p{L}\p{N}]+/gu)?.slice(0, 6);
  return `penstock-${words?.join("-") ?? "conversations"}-${day}.json`;
}

/**
 * @param {string} text  of a file
 * @returns {import("./conversation.js").Conversation[]}
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

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
}

function readConversation(conversation, at) {
  const { id, title, updated, tip, messages } = conversation ?? {};
  const check = (fine) => {
    if (!fine) throw new Error(`Conversation ${at + 1} in this file is damaged.`);
  };
  check(ID.test(id) && Number.isFinite(updated) && Array.isArray(messages));
  check(messages.length > 0 && messages.length <= MOST_MESSAGES);
  const known = new Set([null]);
  for (const message of messages) {
    check(ID.test(message?.id) && !known.has(message.id) && known.has(message.parent));
    check(["user", "assistant"].includes(message.role) && typeof message.text === "string");
    known.add(message.id);
  }
  const read = messages.map(readMessage);
  const end = pathTo(read, tip).length > 0 ? tip : read.at(-1).id;
  return { id, title: titleFrom(String(title ?? "")), updated, tip: end, messages: read };
}

function readMessage({ id, parent, role, text, thinking, state, stats }) {
  const ended = role === "user" || state === "done" ? "done" : "stopped";
  const none = { error: null, retryAt: null, stream: null, requestId: null, responseId: null };
  const thought = typeof thinking === "string" ? thinking : "";
  return { id, parent, role, text, thinking: thought, state: ended, stats: readStats(stats), ...none };
}

/** Its figures, where they are figures. */
function readStats(stats) {
  if (stats === null || typeof stats !== "object" || !Number.isFinite(stats.tokens)) return null;
  const number = (value) => (Number.isFinite(value) ? value : null);
  const { tokens, finish, timings } = stats;
  const kept = Object.entries(timings ?? {}).filter(([name, value]) => Number.isFinite(value) || name === "lane");
  return {
    sentAt: 0,
    firstAt: null,
    tokens,
    ttftMs: number(stats.ttftMs),
    tokensPerS: number(stats.tokensPerS),
    finish: typeof finish === "string" ? finish : null,
    timings: timings ? Object.fromEntries(kept) : null,
  };
}

/**
 * What of a file is new here: a conversation that is here already is replaced where the file's is later, unless an
 * answer is being made in it.
 */
export function newIn(read, here) {
  const known = new Map(here.map((each) => [each.id, each]));
  return read.filter(({ id, updated }) => {
    const own = known.get(id);
    return own === undefined || (own.updated < updated && !own.messages.some(isRunning));
  });
}
