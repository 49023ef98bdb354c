/** What comes over the wire: events, pauses, refusals, requests. */

import assert from "node:assert/strict";
import test from "node:test";

import { retryDelayMs } from "../../../static/api.js";
import { titleOf } from "../../../static/errors.js";
import { mayGoOn, Pauses } from "../../../static/resume.js";
import { DEFAULTS, requestFields } from "../../../static/settings.js";
import { EventStreamParser, readEvents } from "../../../static/sse.js";
import { CHAT, RESPONSES, WIRES } from "../../../static/wires.js";

const PARSED = [
  ["data: a\n\n", ["a"]],
  ["data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]],
  ["data: a\ndata: b\n\n", ["a\nb"]],
  ["data:a\n\ndata:  b\n\n", ["a", " b"]],
  ["data\n\n", [""]],
  ["data:\ndata:\n\n", ["\n"]],
  [": ping\ndata: a\n\n", ["a"]],
  [": ping\n\n\n\ndata: a\n\n", ["a"]],
  ["event: x\nid: 1\nretry: 5\ndata: a\nunknown: b\n\n", ["a"]],
  ["id: 1\n\n", []],
  ["data: the last one is not finished\n", []],
  ["data: a: b\n\n", ["a: b"]],
  ["datab: no\n data: no\n\n", []],
  ["\ufeffdata: a\n\n", ["a"]],
  ["data: é€😀\n\n", ["é€😀"]],
];

test("events are the same however the bytes are cut", async () => {
  for (const size of [1, 2, 3, 7, 1000]) {
    for (const [text, expected] of PARSED) {
      const bytes = new TextEncoder().encode(text);
      const body = new ReadableStream({
        start(controller) {
          for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
          controller.close();
        },
      });
      const events = [];
      for await (const { data } of readEvents(body)) events.push(data);
      assert.deepEqual(events, expected, `${text} by ${size}`);
    }
  }
});

test("an event is given as soon as its blank line is there", () => {
  const parser = new EventStreamParser();
  const pushed = ["data: a\r", "\r", "\ndata: b", "\n\n"].map((text) => parser.push(text).map(({ data }) => data));
  assert.deepEqual(pushed, [[], ["a"], [], ["b"]]);
});

test("an event has its own id", () => {
  const text = "id: 0\ndata: a\n\n: ping\nid: 1\ndata: b\n\ndata: c\n\nid: 2\n\ndata: d\n\n";
  const events = new EventStreamParser().push(text).map(({ data, id }) => [data, id]);
  assert.deepEqual(events, [["a", "0"], ["b", "1"], ["c", null], ["d", null]]);
});

test("leaving early cancels the stream", async () => {
  let cancelled = false;
  const body = new ReadableStream({
    start: (controller) => controller.enqueue(new TextEncoder().encode("data: a\n\n")),
    cancel: () => {
      cancelled = true;
    },
  });
  for await (const _ of readEvents(body)) break;
  assert.ok(cancelled);
});

test("retry-after", () => {
  for (const [headers, delay] of [
    [{}, null],
    [{ "retry-after": "3" }, 3000],
    [{ "retry-after": "0" }, 0],
    [{ "retry-after": "3", "retry-after-ms": "250" }, 250],
    [{ "retry-after": "Thu, 01 Jan 1970 00:00:09 GMT" }, 8000],
    [{ "retry-after": "Thu, 01 Jan 1970 00:00:00 GMT" }, 0],
    [{ "retry-after": "soon" }, null],
    [{ "retry-after": "2", "retry-after-ms": "-1" }, 2000],
    [{ "retry-after": "43200", "x-should-retry": "false" }, null],
  ]) {
    assert.equal(retryDelayMs(new Headers(headers), 1000), delay);
  }
});

/** @param {(number[]|"reset")[]} steps */
function pausesAfter(steps) {
  const pauses = new Pauses();
  return steps.map((step) => (step === "reset" ? pauses.reset() : pauses.next(...step)));
}

test("pauses grow until something comes", () => {
  const losses = [1000, 2000, 4000, 8000, 16_000, 32_000].map((at) => [at]);
  const grown = pausesAfter([...losses, "reset", [33_000]]);
  assert.deepEqual(grown, [500, 1000, 2000, 4000, 5000, 5000, undefined, 500]);
});

test("a connection that is lost for two minutes is given up", () => {
  const losses = [[1000], [120_000], [120_900, 60_000], [121_000], [121_001], "reset", [121_002]];
  assert.deepEqual(pausesAfter(losses), [500, 1000, 100, null, null, undefined, 500]);
});

test("the server's wait makes pauses longer but not shorter", () => {
  assert.deepEqual(pausesAfter([[0, 3000], [3000, 0], [4000, null]]), [3000, 1000, 2000]);
});

test("which streams may go on", () => {
  for (const [fault, goesOn] of [
    [{ kind: "lost" }, true],
    [{ kind: "unreachable" }, true],
    [{ kind: "refused", status: 503, code: "store_unavailable" }, true],
    [{ kind: "refused", status: 502 }, true],
    [{ kind: "failed", code: "server_shutting_down" }, true],
    [{ kind: "failed", code: "engine_failed" }, false],
    [{ kind: "refused", status: 401 }, false],
    [{ kind: "refused", status: 400 }, false],
    [{ kind: "gone" }, false],
  ]) {
    assert.equal(mayGoOn(fault), goesOn, JSON.stringify(fault));
  }
});

test("a refusal is the server's mistake only from 500 on", () => {
  const titles = [400, 401, 403, 404, 408, 409, 413, 415, 418, 421, 429, 500, 503, 599].map((status) =>
    titleOf({ kind: "refused", status, code: null, message: "" }),
  );
  const mistakes = titles.flatMap((title, at) => (title === "The server made a mistake" ? [at] : []));
  assert.deepEqual(mistakes, [11, 13]);
  assert.equal(new Set(titles).size, 12); // 418 reads as 400, 599 as 500
  const lane = { kind: "refused", status: 403, code: "service_tier_not_allowed", message: "" };
  assert.match(titleOf(lane), /key does not allow this lane/);
  assert.match(titleOf({ kind: "failed", status: 0, code: "engine_failed", message: "" }), /broke off/);
});

test("empty settings leave the choice to the server", () => {
  assert.deepEqual(requestFields(DEFAULTS, true), { service_tier: "auto" });
  const chosen = { temperature: 0, topP: 0.9, maxTokens: 7, minP: 0.1, seed: 1, stop: "a\n\nb", lane: "batch" };
  assert.deepEqual(requestFields({ ...DEFAULTS, ...chosen, effort: "low" }, false), {
    temperature: 0,
    top_p: 0.9,
    max_tokens: 7,
    min_p: 0.1,
    seed: 1,
    stop: ["a", "b"],
    service_tier: "flex",
  });
  assert.equal(requestFields({ ...DEFAULTS, effort: "low" }, true).reasoning_effort, "low");
});

test("how much it thinks and what is left out goes in the words of either interface", () => {
  const said = ["user", "assistant", "user", "assistant", "user"].map((role, at) => ({ role, content: String(at) }));
  const fields = { reasoning_effort: "none" };
  const body = (path, fit) => WIRES[path].body(fields, { previous: null, messages: said, fit }, "Be brief.");
  const { reasoning, truncation, input } = body(RESPONSES, 1);
  assert.deepEqual([reasoning, truncation, input.length], [{ effort: "none" }, "auto", 5]);
  assert.equal(body(RESPONSES, 0).truncation, undefined);
  const left = [0, 1, 2, 9].map((fit) => body(CHAT, fit).messages.map(({ content }) => content));
  assert.deepEqual(left, [
    ["Be brief.", "0", "1", "2", "3", "4"],
    ["Be brief.", "2", "3", "4"],
    ["Be brief.", "4"],
    ["Be brief.", "4"],
  ]);
  assert.equal(body(CHAT, 0).reasoning_effort, "none");
});
