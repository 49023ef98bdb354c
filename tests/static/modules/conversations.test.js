/** Conversations: their trees, what is sent and stored of them, files, searching. */

import assert from "node:assert/strict";
import test from "node:test";

import * as m from "../../../static/conversation.js";
import { ageOf, find } from "../../../static/search.js";
import { newStats, Meter } from "../../../static/stats.js";
import { MemoryStore } from "../../../static/store.js";
import { splitThinking } from "../../../static/thinking.js";
import { exportName, exportText, markdownText, newIn, readExport } from "../../../static/transfer.js";
import { hasFollowers, newestEnd, pathTo, siblingsOf } from "../../../static/tree.js";

test("what the server is told of a conversation", () => {
  const talk = m.newConversation();
  const first = m.ask(talk, "hi");
  Object.assign(first, { text: "<think>They greet.</think>hello", responseId: "resp_1" });
  m.ask(talk, "and?");
  const last = m.ask(talk, "well?");
  const other = m.ask(talk, "how?", first.id);
  const said = [[last, true], [last, false], [other, true], [other, false]].map(([answer, isWhole]) => {
    const { previous, messages } = m.saidBefore(talk, answer, isWhole);
    return [previous, ...messages.map(({ role, content }) => `${role}: ${content}`)];
  });
  const common = [null, "user: hi", "assistant: hello"];
  assert.deepEqual(said, [
    [...common, "user: and?", "user: well?"],
    ["resp_1", "user: and?", "user: well?"],
    [...common, "user: how?"],
    ["resp_1", "user: how?"],
  ]);
});

test("what another tab did is taken over", () => {
  // Both went on from "b": here with "d", which is being made, there with "e" and "f". Of these the other tab tells.
  const message = (id, parent, text, state = "done") => ({ id, parent, text, state, thinking: "", retryAt: 7 });
  const before = [message("a", null, "?"), message("b", "a", "!", "streaming"), message("c", "b", "??")];
  const here = { tip: "d", title: "old", messages: [...before, message("d", "c", "own", "streaming")] };
  const told = [message("b", "a", "!!"), message("d", "c", "", "waiting"), message("e", "b", "x"), message("f", "e", "y")];
  const head = { tip: "f", title: "new", updated: 1, systemPrompt: "Be brief." };
  const changed = m.takeOver(here, { head, messages: told }, ({ id }) => id === "d");
  assert.deepEqual(changed.map(({ id }) => id), ["b"]);
  assert.deepEqual(here.messages.map(({ id, text }) => id + text), ["a?", "b!!", "c??", "down", "ex", "fy"]);
  assert.deepEqual([here.tip, here.title, here.systemPrompt, here.messages.at(-1).retryAt], ["d", "new", "Be brief.", null]);
  here.tip = "b";
  m.takeOver(here, { head, messages: [] }, () => false);
  assert.equal(here.tip, "f"); // the other tab went on from what is shown here
});

test("asking again makes another version, and only a failure gives up its place", () => {
  for (const [error, followed] of [[{ kind: "lost" }, false], [{ kind: "lost" }, true], [null, false], [null, true]]) {
    const talk = m.newConversation();
    const first = m.ask(talk, "hi");
    Object.assign(first, { text: "x", state: error ? "failed" : "done", error, retryAt: 1, shortened: true });
    if (followed) m.ask(talk, "more");
    const again = m.askAgain(talk, first);
    const inItsPlace = error !== null && !followed;
    assert.equal(again.id === first.id, inItsPlace);
    assert.equal(m.shownIn(talk).length, 2);
    assert.deepEqual([again.error, again.retryAt, again.shortened, again.text, again.state], [null, null, false, "", "waiting"]);
    assert.equal(again.parent, first.parent);
    assert.equal(talk.messages.length, 2 + (followed ? 2 : 0) + (inItsPlace ? 0 : 1));
  }
});

test("a tree of messages", () => {
  // Each was made after those to its left.
  const edges = [["a", null], ["b", "a"], ["c", "b"], ["d", "a"], ["e", "c"], ["f", "d"], ["g", "b"], ["h", null]];
  const tree = edges.map(([id, parent]) => ({ id, parent }));
  const circle = [{ id: "x", parent: "y" }, { id: "y", parent: "x" }];
  for (const [nodes, ids] of [
    [pathTo(tree, "e"), "abce"],
    [pathTo(tree, "h"), "h"],
    [pathTo(tree, null), ""],
    [pathTo(tree, "unknown"), ""],
    [pathTo(circle, "x"), "yx"],
    [siblingsOf(tree, tree[3]), "bd"],
    [siblingsOf(tree, tree[0]), "ah"],
    [[0, 1, 2, 7].map((at) => newestEnd(tree, tree[at])), "fgeh"],
    [tree.filter((each) => hasFollowers(tree, each)), "abcd"],
  ]) {
    assert.equal(nodes.map(({ id }) => id).join(""), ids);
  }
});

test("thoughts between tags are apart", () => {
  for (const [text, thinking, answer, isThinking] of [
    ["plain", "", "plain", false],
    ["<think>", "", "", true],
    ["<think>so", "so", "", true],
    ["<think>\nso\n</think>\n\nyes", "so", "yes", false],
    ["\n<think></think>yes", "", "yes", false],
    ["the template opened it</think>yes", "the template opened it", "yes", false],
    ["it says <think> in the middle", "", "it says <think> in the middle", false],
  ]) {
    assert.deepEqual(splitThinking(text), { thinking, answer, isThinking });
  }
});

test("a stored answer goes on if it is known where", () => {
  for (const [stream, ageMs, state] of [
    [{ id: "chatcmpl-1", number: 7 }, 86_400_000, "streaming"],
    [{ id: null, number: -1 }, 599_000, "streaming"],
    [{ id: null, number: -1 }, 601_000, "stopped"],
    [null, 0, "stopped"],
    [undefined, 0, "stopped"],
  ]) {
    const message = { id: "a", state: "streaming", retryAt: 1, stream };
    const [settled] = m.settle({ updated: 1000, messages: [message] }, 1000 + ageMs).messages;
    assert.deepEqual([settled.state, settled.retryAt, settled.stream], [state, null, stream ?? null]);
  }
});

test("conversations are found by their words", () => {
  const talk = (id, title, ...texts) => ({ id, title, updated: 0, messages: texts.map((text) => ({ text })) });
  const soup = "Yes, with leeks and a potato or two, and perhaps some cream";
  const all = [talk("1", "Dinner plans", "Soup?", soup), talk("2", "Rivers", "the Leek flows"), talk("3", "Nothing")];
  for (const [query, found] of [
    ["dinner", [["1", null]]],
    ["LEEK", [["1", soup], ["2", "the Leek flows"]]],
    ["potato leeks", [["1", "…leeks and a potato or two, and perhaps some cream"]]],
    ["leek soup", []],
    ["n", [["1", null], ["3", null]]],
  ]) {
    assert.deepEqual(find(all, query).map(({ conversation, excerpt }) => [conversation.id, excerpt]), found, query);
  }
});

test("conversations are grouped by their age", () => {
  const at = (...time) => new Date(2026, 2, ...time).getTime();
  const times = [[30, 0, 1], [29, 23, 59], [29, 0, 0], [28, 12], [23, 1], [22, 1], [1]];
  assert.deepEqual(
    times.map((time) => ageOf(at(...time), at(30, 15))),
    ["Today", "Yesterday", "Yesterday", "The last seven days", "The last seven days", "Earlier", "Earlier"],
  );
});

const FILE = {
  format: "penstock.conversations",
  version: 1,
  conversations: [
    {
      id: "c1",
      title: "Lanes",
      updated: 5,
      tip: "b",
      systemPrompt: "Be brief.",
      messages: [
        { id: "a", parent: null, role: "user", text: "hi", state: "done", stats: null },
        {
          id: "b",
          parent: "a",
          role: "assistant",
          text: "<think>Well.</think>hello",
          state: "streaming",
          stats: { tokens: 2, ttftMs: "1", finish: "stop", timings: { lane: "batch", x: {} } },
        },
      ],
    },
  ],
};

test("a file brings back what was exported", () => {
  const read = readExport(JSON.stringify(FILE));
  assert.deepEqual(readExport(exportText(read)), read);
  const [{ messages, tip, systemPrompt }] = read;
  assert.deepEqual([messages[1].state, tip, systemPrompt], ["stopped", "b", "Be brief."]);
  const { tokens, ttftMs, timings } = messages[1].stats;
  assert.deepEqual([tokens, ttftMs, timings], [2, null, { lane: "batch" }]);
});

test("the branch that is shown can be read as Markdown", () => {
  const [read] = readExport(JSON.stringify(FILE));
  assert.equal(markdownText(read), "# Lanes\n\n## You\n\nhi\n\n## Answer\n\nhello\n");
  assert.equal(exportName([read], 0, "md"), "penstock-lanes-1970-01-01.md");
});

test("a damaged file is refused", () => {
  for (const [path, value, said] of [
    [["format"], "other", /no conversations of Penstock/],
    [["conversations"], {}, /no conversations of Penstock/],
    [["version"], 2, /a later version/],
    [["conversations", 0], null, /Conversation 1 in this file is damaged/],
    [["conversations", 0, "id"], "<b>", /damaged/],
    [["conversations", 0, "id"], 7, /damaged/],
    [["conversations", 0, "updated"], "now", /damaged/],
    [["conversations", 0, "messages"], [], /damaged/],
    [["conversations", 0, "messages", 0, "parent"], "b", /damaged/],
    [["conversations", 0, "messages", 1, "id"], "a", /damaged/],
    [["conversations", 0, "messages", 1, "role"], "system", /damaged/],
    [["conversations", 0, "messages", 1, "text"], 7, /damaged/],
  ]) {
    const file = structuredClone(FILE);
    const place = path.slice(0, -1).reduce((inside, name) => inside[name], file);
    place[path.at(-1)] = value;
    assert.throws(() => readExport(JSON.stringify(file)), said);
  }
  assert.throws(() => readExport("{"), /not JSON/);
});

test("of a file only what is newer is taken", () => {
  const talk = (id, updated, state = "done") => ({ id, updated, messages: [{ state }] });
  const here = [talk("same", 1), talk("older", 1), talk("newer", 9), talk("running", 1, "streaming")];
  const read = [talk("same", 1), talk("older", 2), talk("newer", 2), talk("running", 2), talk("new", 1)];
  assert.deepEqual(newIn(read, here).map(({ id }) => id), ["older", "new"]);
});

test("titles", () => {
  for (const [text, title] of [
    ["Short", "Short"],
    ["  first\nsecond", "first"],
    ["word ".repeat(30), `${"word ".repeat(11)}word…`],
    ["x".repeat(100), `${"x".repeat(60)}…`],
  ]) {
    assert.equal(m.titleFrom(text), title);
  }
});

test("the context that is used is that of the last answer with figures", () => {
  const answer = (tokens, prompt) => ({ stats: { tokens, timings: prompt ? { prompt_tokens: prompt } : null } });
  assert.equal(m.tokensOf([]), 0);
  assert.equal(m.tokensOf([{ stats: null }, answer(5, 40), { stats: null }, answer(2, 0)]), 45);
});

test("a store in memory keeps copies", async () => {
  const store = new MemoryStore();
  const talk = m.newConversation();
  const answer = m.ask(talk, "hi");
  await store.put(talk, talk.messages);
  answer.text = "later";
  assert.deepEqual((await store.messages(talk.id)).map(({ text }) => text), ["hi", ""]);
  assert.equal((await store.heads())[0].running, true);
  await store.delete(talk.id);
  assert.deepEqual(await store.heads(), []);
});

test("a meter counts, and the server's figures correct it", () => {
  const meter = new Meter(newStats(100));
  const piece = { text: "", thinking: "", finish: null, timings: null, tokens: null };
  const pieces = [
    [150, { text: "a" }],
    [160, { text: "b" }],
    [350, { text: "c" }],
    [355, { finish: "length", timings: { tpot_ms: 50 } }],
    [360, { tokens: 5 }],
  ];
  const seen = pieces.map(([now, given]) => {
    meter.take({ ...piece, ...given }, now);
    const { tokens, ttftMs, tokensPerS, finish } = meter.stats;
    return [tokens, ttftMs, tokensPerS, finish];
  });
  assert.deepEqual([seen[1], seen[2], seen[4]], [[2, 50, null, null], [3, 50, 10, null], [5, 50, 20, "length"]]);
});
