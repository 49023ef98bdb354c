/** One answer in the making: the stream goes in, the message follows it, whatever becomes of connections. */

import { discard, followAnswer, openAnswer } from "./api.js";
import { newId } from "./conversation.js";
import { ApiError } from "./fault.js";
import { tellAnswer } from "./hooks.js";
import { Pauses, isPassing, pause } from "./resume.js";
import { Meter, newStats } from "./stats.js";
import { partsOf } from "./thinking.js";
import { RESPONSES } from "./wires.js";

const DISCARD_WITHIN_MS = 60_000;
const UNKNOWN = ["previous_response_not_found", "previous_response_not_ready", "store_unavailable"];

/**
 * Ends when the answer does, whatever its end: the message's state says which. Never throws for
 * what a server or a network can do.
 * @param {import("./conversation.js").Message} message  an answer that waits, or one whose stream was left
 * @param {(isWhole: boolean) => Promise<{path: string, body: object}>} prepare  makes the request; isWhole: of all that
 *   was said, for the server does not know what was said before
 * @param {{signal: AbortSignal, key: ?string, onChange: (urgent?: boolean) => void}} options
 *   urgent: a reload would need to know of this change
 */
export async function runAnswer(message, prepare, options) {
  const { signal, key, onChange } = options;
  message.stats ??= newStats(Date.now());
  try {
    if (message.stream === null) await open(message, prepare, false, signal);
    try {
      await read(message, options);
    } catch (fault) {
      if (!message.stream.body?.previous_response_id || !UNKNOWN.includes(fault.code)) throw fault;
      await open(message, prepare, true, signal);
      await read(message, options);
    }
    message.state = "done";
    message.responseId = sessionOf(message);
  } catch (fault) {
    const isOver = fault.code === "cancelled" || fault.kind === "gone"; // on the server; cancelled: in another tab
    if (signal.aborted || fault.code === "cancelled") message.state = "stopped";
    else if (fault instanceof ApiError) fail(message, fault);
    else throw fault;
    const isLeft = signal.aborted ? message.stream !== null : message.stream?.id && !isOver;
    if (isLeft) end(message.stream, key).catch(() => {}); // it is gone, or the server is
  }
  message.stream = null;
  onChange();
  tellAnswer(message, "end");
}

async function open(message, prepare, isWhole, signal) {
  const request = await prepare(isWhole);
  signal.throwIfAborted();
  message.requestId = newId();
  message.stream = { name: message.requestId, ...request, id: null, number: -1 };
}

/** Until the answer's end, over as many connections as it takes. */
async function read(message, { signal, key, onChange }) {
  const meter = new Meter(message.stats);
  const pauses = new Pauses();
  onChange(true);
  tellAnswer(message, "asked");
  for (;;) {
    try {
      const connect = message.stream.id === null ? openAnswer : followAnswer;
      for await (const piece of connect(message.stream, { signal, key })) {
        pauses.reset();
        take(message, piece, meter, onChange);
      }
      return;
    } catch (fault) {
      if (signal.aborted || !canGoOn(message, fault)) throw fault;
      const wait = pauses.next(performance.now(), fault.retryAfterMs);
      if (wait === null) throw fault;
      message.state = "reconnecting";
      onChange(true);
      await pause(wait, signal);
    }
  }
}

/** A request that the server has not begun to answer is refused, not lost. */
function canGoOn({ stream, state }, fault) {
  const begun = stream.id !== null || state === "reconnecting" || fault.kind === "lost";
  return begun && isPassing(fault);
}

function take(message, piece, meter, onChange) {
  const { stream } = message;
  if (piece.number !== null && piece.number <= stream.number) return;
  const isFirst = stream.id === null;
  Object.assign(stream, { id: piece.id ?? stream.id, number: piece.number ?? stream.number, body: null });
  meter.take(piece, Date.now());
  message.text += piece.text;
  message.thinking += piece.thinking;
  message.state = message.text === "" && message.thinking === "" ? "waiting" : "streaming";
  onChange(isFirst);
  tellAnswer(message, "piece", piece.text !== "");
}

/** Where the next turn goes on from: not where thoughts stand in the text, which the server would send again. */
function sessionOf(message) {
  const { path, id } = message.stream;
  return path === RESPONSES && partsOf(message).answer === message.text ? id : null;
}

/** Leaves nothing of it on the server. An answer whose id is not known yet says it first. */
async function end({ id, body, ...stream }, key) {
  if (id !== null) return discard({ id, ...stream }, key);
  const signal = AbortSignal.timeout(DISCARD_WITHIN_MS);
  for await (const piece of openAnswer({ body, ...stream }, { signal, key })) {
    return discard({ ...stream, id: piece.id }, key);
  }
}

function fail(message, { kind, status, code, message: text, retryAfterMs }) {
  message.state = "failed";
  message.error = { kind, status, code, message: text };
  message.retryAt = retryAfterMs === null ? null : Date.now() + retryAfterMs;
}
