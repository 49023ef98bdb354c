/** One answer in the making: the stream goes in, the message follows it. */

import { ApiError, streamChat } from "./api.js";
import { Meter } from "./stats.js";

/**
 * Ends when the answer does, whatever its end: the message's state says which. Never throws for
 * what a server or a network can do.
 * @param {import("./conversation.js").Message} message  an answer that waits
 * @param {() => Promise<object>} prepare  makes OpenAI's chat completion request
 * @param {{signal: AbortSignal, key: ?string, onChange: () => void}} options
 */
export async function runAnswer(message, prepare, { signal, key, onChange }) {
  const meter = new Meter(performance.now());
  message.stats = meter.stats;
  try {
    for await (const event of streamChat(await prepare(), { signal, key })) {
      meter.take(event, performance.now());
      message.text += event.text;
      if (event.text !== "") message.state = "streaming";
      onChange();
    }
    message.state = "done";
  } catch (fault) {
    if (signal.aborted) message.state = "stopped";
    else if (fault instanceof ApiError) fail(message, fault);
    else throw fault;
  }
  onChange();
}

function fail(message, { kind, status, code, message: text, retryAfterMs }) {
  message.state = "failed";
  message.error = { kind, status, code, message: text };
  message.retryAt = retryAfterMs === null ? null : Date.now() + retryAfterMs;
}
