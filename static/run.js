/** One answer in the making: the stream goes in, the message follows it, whatever becomes of connections. */

import { ApiError, discardChat, followChat, streamChat } from "./api.js";
import { newId } from "./conversation.js";
import { tellAnswer } from "./hooks.js";
import { Pauses, isPassing, pause } from "./resume.js";
import { Meter, newStats } from "./stats.js";

const DISCARD_WITHIN_MS = 60_000;

/**
 * Ends when the answer does, whatever its end: the message's state says which. Never throws for
 * what a server or a network can do.
 * @param {import("./conversation.js").Message} message  an answer that waits, or one whose stream was left
 * @param {() => Promise<object>} prepare  makes OpenAI's chat completion request
 * @param {{signal: AbortSignal, key: ?string, onChange: (urgent?: boolean) => void}} options
 *   urgent: a reload would need to know of this change
 */
export async function runAnswer(message, prepare, { signal, key, onChange }) {
  message.stats ??= newStats(Date.now());
  try {
    if (message.stream === null) await open(message, prepare, signal);
    onChange(true);
    tellAnswer(message, "asked");
    await read(message, { signal, key, onChange });
    message.state = "done";
  } catch (fault) {
    if (signal.aborted) stop(message, key);
    else if (fault instanceof ApiError) fail(message, fault);
    else throw fault;
  }
  message.stream = null;
  onChange();
  tellAnswer(message, "end");
}

async function open(message, prepare, signal) {
  const body = await prepare();
  signal.throwIfAborted();
  message.requestId = newId();
  message.stream = { name: message.requestId, body, id: null, number: -1 };
}

/** Until the answer's end, over as many connections as it takes. */
async function read(message, { signal, key, onChange }) {
  const meter = new Meter(message.stats);
  const pauses = new Pauses();
  for (;;) {
    try {
      for await (const chunk of connect(message.stream, { signal, key })) {
        pauses.reset();
        take(message, chunk, meter, onChange);
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

function connect({ name, body, id, number }, { signal, key }) {
  return id === null ? streamChat(body, { signal, key, name }) : followChat(id, number, { signal, key });
}

/** A request that the server has not begun to answer is refused, not lost. */
function canGoOn({ stream, state }, fault) {
  const begun = stream.id !== null || state === "reconnecting" || fault.kind === "lost";
  return begun && isPassing(fault);
}

function take(message, chunk, meter, onChange) {
  const { stream } = message;
  if (chunk.number !== null && chunk.number <= stream.number) return;
  const isFirst = stream.id === null;
  Object.assign(stream, { id: chunk.id, number: chunk.number ?? stream.number, body: null });
  meter.take(chunk, Date.now());
  message.text += chunk.text;
  message.thinking += chunk.thinking;
  message.state = message.text === "" && message.thinking === "" ? "waiting" : "streaming";
  onChange(isFirst);
  tellAnswer(message, "frame", chunk.raw);
}

function stop(message, key) {
  message.state = "stopped";
  if (message.stream !== null) discard(message.stream, key).catch(() => {}); // it is gone, or the server is
}

/** An answer whose id is not known yet says it first. */
async function discard({ id, name, body }, key) {
  if (id !== null) return discardChat(id, key);
  const signal = AbortSignal.timeout(DISCARD_WITHIN_MS);
  for await (const chunk of streamChat(body, { signal, key, name })) return discardChat(chunk.id, key);
}

function fail(message, { kind, status, code, message: text, retryAfterMs }) {
  if (code === "cancelled") {
    message.state = "stopped"; // in another tab
    return;
  }
  message.state = "failed";
  message.error = { kind, status, code, message: text };
  message.retryAt = retryAfterMs === null ? null : Date.now() + retryAfterMs;
}
