/**
 * Server-sent events over a fetch body (EventSource can neither POST nor send a key).
 * https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
 */

const LINE_END = /\r\n|\r|\n/g;

/**
 * @typedef {object} ServerEvent
 * @property {string} data
 * @property {?string} event  what kind it is, if it says so
 * @property {?string} id  the event's own; the last one is not inherited as by EventSource
 */

/** Turns decoded text, cut anywhere, into complete events. */
export class EventStreamParser {
  #line = ""; // the line that has not ended yet
  /** @type {string[]} the data lines of the event that has not ended yet */
  #data = [];
  /** @type {?string} of that event */
  #id = null;
  /** @type {?string} */
  #event = null;
  #afterCarriageReturn = false; // a "\n" that opens the next piece belongs to the last line end

  /**
   * @param {string} text the next piece of the stream
   * @returns {ServerEvent[]} every event that this piece completed
   */
  push(text) {
    if (text === "") return [];
    /** @type {ServerEvent[]} */
    const events = [];
    let start = this.#afterCarriageReturn && text.startsWith("\n") ? 1 : 0;
    LINE_END.lastIndex = start;
    for (let end = LINE_END.exec(text); end !== null; end = LINE_END.exec(text)) {
      this.#endLine(this.#line + text.slice(start, end.index), events);
      this.#line = "";
      start = LINE_END.lastIndex;
    }
    this.#line += text.slice(start);
    this.#afterCarriageReturn = text.endsWith("\r");
    return events;
  }

  /** @param {string} line  @param {ServerEvent[]} events  that have ended */
  #endLine(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push({ data: this.#data.join("\n"), id: this.#id, event: this.#event });
      this.#data = [];
      this.#id = this.#event = null;
      return;
    }
    const colon = line.indexOf(":");
    const field = colon === -1 ? line : line.slice(0, colon);
    const value = colon === -1 ? "" : valueAfter(line, colon);
    if (field === "data") this.#data.push(value);
    else if (field === "id") this.#id = value;
    else if (field === "event") this.#event = value;
  }
}

/**
 * One space after the colon belongs to the syntax, any further one to the value.
 * @param {string} line
 * @param {number} colon
 */
function valueAfter(line, colon) {
  return line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
}

/**
 * Each event in a byte stream. Leaving the loop early cancels the stream.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // drops a leading byte order mark, keeps characters cut in two
  const parser = new EventStreamParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that broke is cancelled already
  }
}
