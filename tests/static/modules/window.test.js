/** The pure modules of the window into the engine. */

import assert from "node:assert/strict";
import test from "node:test";

import * as format from "../../../static/format.js";
import { decodeBlocks, fit, levels, strength } from "../../../static/window/blocks.js";
import { History, perSecond, tableRows, trailingRatio } from "../../../static/window/history.js";
import { standing } from "../../../static/window/lanes.js";
import { areaPath, linePath, niceTop, stack, stretches } from "../../../static/window/shapes.js";
import { aligned, spansOf, thinned } from "../../../static/window/spans.js";
import { rowsOf, summary } from "../../../static/window/steps.js";
import { rows, sentence } from "../../../static/window/timeline.js";

const times = (value, count) => Array(count).fill(value);

test("numbers are written as people read them", () => {
  for (const [name, value, text] of [
    ["number", null, "–"],
    ["number", 0, "0"],
    ["number", 0.42, "0.4"],
    ["number", 7, "7"],
    ["number", 38.4, "38"],
    ["number", 12_345.6, "12,346"],
    ["percent", null, "–"],
    ["percent", 0, "0 %"],
    ["percent", 0.333, "33 %"],
    ["percent", 0.9996, "99.9 %"],
    ["percent", 1, "100 %"],
    ["ordinal", 1, "1st"],
    ["ordinal", 2, "2nd"],
    ["ordinal", 3, "3rd"],
    ["ordinal", 11, "11th"],
    ["ordinal", 113, "113th"],
    ["ordinal", 121, "121st"],
    ["ago", 0, "now"],
    ["ago", 12.5, "13 s ago"],
    ["duration", 0, "0 ms"],
    ["duration", 3.24, "3.2 ms"],
    ["duration", 85.4, "85 ms"],
    ["duration", 999.6, "1.0 s"],
    ["duration", 1240, "1.2 s"],
    ["duration", 9960, "10 s"],
    ["duration", 48_000, "48 s"],
  ]) {
    assert.equal(format[name](value), text);
  }
});

/** @param {number} output */
function sample(output, hits = 0, queries = 0, seconds = 0.5) {
  const steps = { output_tokens: output, num_steps: 4, prefix_hit_tokens: hits, prefix_query_tokens: queries };
  return { seconds, steps };
}

test("a minute is kept with its gaps, and without those of slow events", () => {
  const history = new History();
  const pushed = [[sample(10), 0], [sample(20), 500], [sample(30), 2_300], [sample(40), 8_300], [sample(5, 0, 0, 0), 8_800]];
  for (const [one, at] of pushed) history.push(one, at);
  const rates = history.series(perSecond("output_tokens"));
  assert.equal(rates.length, 120);
  assert.deepEqual(rates.filter((rate) => rate !== null), [20, 40, 60, 80]);
  assert.deepEqual(rates.slice(-14), [60, ...times(null, 11), 80, null]); // 6 s without an event are 11 that are missing
  assert.deepEqual(rates.slice(-17, -14), [null, 20, 40]);
});

test("ratios are of the last ten seconds", () => {
  const samples = [sample(0, 8, 10), sample(0), null, sample(0, 0, 10), ...times(sample(0), 20)];
  const ratios = trailingRatio(samples, "prefix_hit_tokens", "prefix_query_tokens");
  assert.deepEqual(ratios, [0.8, 0.8, null, ...times(0.4, 17), ...times(0, 3), null]);
});

test("a table has means, and leaves out what nobody saw", () => {
  const series = [
    [...times(null, 9), 4, ...times(null, 10), ...Array.from({ length: 10 }, (_, at) => at)],
    [...times(null, 20), ...times(1, 5), ...times(null, 5)],
  ];
  assert.deepEqual(tableRows(series), [
    { secondsAgo: 0, means: [4.5, 1] },
    { secondsAgo: 10, means: [4, null] },
  ]);
});

test("the upper edge is a round number", () => {
  const tops = [[0, 1, 1], [0.3, 1, 1], [1, 1, 1], [1.01, 1, 1.5], [11, 1, 15], [99, 10, 100], [3, 20, 20], [1074, 10, 1500]];
  for (const [most, least, top] of tops) assert.equal(niceTop(most, least), top);
});

test("lines stop at gaps, and areas stand on each other", () => {
  const size = { width: 40, height: 10, top: 10 };
  const [low, high] = stack([[5, 5, null, 0, 20], [1, null, null, 2, 3]]).map((one) => stretches(one, size));
  assert.equal(linePath(low), "M0,5L10,5M30,10L40,0");
  assert.equal(areaPath(low, size.height), "M0,5L10,5L10,10L0,10ZM30,10L40,0L40,10L30,10Z");
  assert.equal(areaPath(high, size.height, low), "M0,4L10,5L10,5L0,5ZM30,8L40,0L40,0L30,10Z");
  assert.equal(linePath([[[3, 4]]]), "M3,4h.6");
});

test("the blocks are read, and stand as water in a tank", () => {
  const encoded = (...numbers) => Buffer.from(numbers).toString("base64");
  const blocks = decodeBlocks({
    num_blocks: 96,
    blocks_per_cell: 32,
    held: encoded(255, 1, 0),
    shared: encoded(128, 0, 0),
    cached: encoded(0, 2, 0),
    holders: encoded(9, 1, 0),
    num_held: 33,
    num_shared: 16,
    num_cached: 1,
    num_saved: 40,
  });
  assert.deepEqual(blocks.numbers, { shared: 16, alone: 17, cached: 1, free: 62 });
  assert.deepEqual([0, 1, 2].map((at) => levels(blocks, at, 10)), [
    { shared: 5, held: 10, cached: 10 },
    { shared: 0, held: 1, cached: 2 },
    { shared: 0, held: 0, cached: 0 },
  ]);
  assert.deepEqual([...blocks.holders], [9, 1, 0]);
  assert.deepEqual([0, 1, 2, 8, 32, 200].map(strength), [0, 0, 0, 0.5, 1, 1]);
});

test("any number of cells fits its field", () => {
  for (const count of [1, 32, 960, 1024]) {
    for (const width of [250, 400, 800]) {
      const { columns, rows: lines, side } = fit(count, width, 232);
      assert.ok(columns * side <= width && lines * side <= 232 && columns * lines >= count);
    }
  }
});

test("a set of steps in one sentence", () => {
  const steps = { duration_ms: [4, 6], prefill: [0, 30], decode: [2, 3], drafts: [4, 0], accepted: [3, 0] };
  assert.equal(
    summary(rowsOf(steps)),
    "The last 2 steps took 5 ms each, with 2.5 sequences and 15 prompt tokens; 3 of 4 drafts were right.",
  );
  assert.equal(summary([]), "No step since this view was opened.");
});

test("how a lane stands to its promise", () => {
  const lanes = [[100, 1000, "kept"], [800, 1000, "close"], [1200, 1000, "over"], [9, null, "none"], [null, 9, "none"]];
  for (const [forecast, promised, expected] of lanes) {
    assert.equal(standing({ forecast_ttft_ms: forecast, promised_ttft_ms: promised }), expected);
  }
});

const TIMINGS = {
  queue_ms: 10,
  ttft_ms: 40,
  predicted_ttft_ms: 50,
  prompt_tokens: 48,
  cached_tokens: 16,
  draft_tokens: 4,
  accepted_tokens: 3,
  preemptions: 1,
  timeline: {
    prefills: [[25, 16], [40, 16], [95, 8]],
    preempted_ms: [60],
    resumed_ms: [80],
    drafts: [[50, 4, 3]],
    ended_ms: 120,
  },
};

test("the spans of an answer that gave way once", () => {
  const { spans, drafts } = spansOf(TIMINGS);
  assert.deepEqual(spans.map((span) => [span.kind, span.from, span.to]), [
    ["queued", 0, 10],
    ["prefill", 10, 25],
    ["prefill", 25, 40],
    ["decode", 40, 60],
    ["away", 60, 80],
    ["prefill", 80, 95],
    ["decode", 95, 120],
  ]);
  assert.deepEqual(drafts, [{ at: 50, drafted: 4, accepted: 3 }]);
});

test("an answer that was away at its end", () => {
  const timeline = { ...TIMINGS.timeline, prefills: [[40, 32]], resumed_ms: [] };
  const { spans } = spansOf({ ...TIMINGS, timeline });
  assert.deepEqual(spans.map(({ kind }) => kind), ["queued", "prefill", "decode", "away"]);
  assert.equal(spans.at(-1).to, 120);
});

test("ticks are put on the server's clock and thinned", () => {
  assert.deepEqual(aligned([1000, 1010, 1050], 40), [40, 50, 90]);
  assert.deepEqual(aligned([], 40), []);
  assert.deepEqual(thinned(Array.from({ length: 1000 }, (_, at) => at), 5), [0, 250, 500, 749, 999]);
});

test("the strip in words and as rows", () => {
  const { spans, drafts } = spansOf(TIMINGS);
  assert.equal(
    sentence(TIMINGS, spans),
    "Timeline: queued 10 ms; 32 of 48 prompt tokens computed in 3 steps; first token after 40 ms, predicted 50 ms; " +
      "3 of 4 drafts accepted; preempted 1 time.",
  );
  assert.deepEqual(rows(TIMINGS, spans, drafts).map(({ what }) => what), [
    "queued",
    "16 prompt tokens computed",
    "16 prompt tokens computed",
    "first token",
    "tokens",
    "4 drafts, 3 accepted",
    "preempted",
    "8 prompt tokens computed",
    "tokens",
  ]);
});
