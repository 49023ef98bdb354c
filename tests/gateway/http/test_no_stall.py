"""No body within the limits holds the server up: measured in processor time, beside a plain request's.

Two clocks, both deaf to other processes. That of the event loop's thread, around every callback, says for how long the
loop was held. That of the whole process, between the ticks of a thread that does nothing else, says for how long
nobody could have the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Lane, LanePolicy
from tests.gateway.harness import MODEL, Gateway, chat_body, client, completion_body, logprobs, make_tokenizer

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
CONTEXT = 131_072
MAX_BYTES = Limits().max_body_bytes
MOST_VALUES = Limits().max_json_values

HELD_BY_LOOP = 40
"""Plain requests' worth of time. Where a plain one takes half a millisecond, as it does on a slow core, it is 20 ms."""
HELD_IN_ONE_PIECE = 200
TIMES_ITS_SIZE = 20
SPARE_BYTES = 32 * 1024 * 1024
"""The memory that any request may take besides: thousands of empty messages take a few megabytes, and the tokenizer
200 bytes for each of a text that fits into the context."""


def filled(start: str, entry: str, end: str, most: int = MAX_BYTES) -> bytes:
    """A body of `most` bytes that is nearly all one list of the same entries."""
    number = (most - len(start) - len(end)) // (len(entry) + 1)
    return f"{start}{','.join([entry] * number)}{end}".encode()


def numbered(start: str, entry: str, end: str, number: int) -> bytes:
    """Repeats an entry, each with its own number in it."""
    return f"{start}{','.join(entry % i for i in range(number))}{end}".encode()[:MAX_BYTES]


MODEL_JSON = f'"model":"{MODEL}"'
HELLO = '"messages":[{"role":"user","content":"Hi"}]'
IN_CHAT = f"{{{MODEL_JSON},{HELLO},"
IN_TEXT = f'{{{MODEL_JSON},"prompt":"Hi",'
IN_RESPONSE = f'{{{MODEL_JSON},"input":"Hi",'
MESSAGE = '{"role":"user","content":""}'
PART = '{"type":"text","text":""}'
SHORT, MANY_BYTES = "All work and no play. " * 46, 1024 * 1015
CALL = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
PROMPTS = f'{{{MODEL_JSON},"prompt":["a"' + ',"a"' * 63 + "],"
WORD = "All work and no play. " * 11
DECISIONS = "/v1/decisions"
QUESTION = '{"type":"predicate","instructions":"Is it so, now?"}'
IN_QUESTIONS = f'{{{MODEL_JSON},"input":"Hi","questions":['
CHOICES = '{"type":"choice","name":"%%d","instructions":"","choices":[%s]}'
LONG = "All work and no play. " * (CONTEXT * 3 // 4 // 22)

# Every field that takes a list or a map, at its largest: right, wrong, and as large as it is let in.
CORPUS: dict[str, tuple[str, bytes]] = {
    "prompt of floats": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "0.5", "]}")),
    "prompt of zeros": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "0", "]}")),
    "prompt of texts": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', '"a"', "]}")),
    "prompt of lists": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "[]", "]}")),
    "prompts of zeros": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', f"[{','.join(['0'] * 60_000)}]", "]}"),
    ),
    "prompt to the brim": (COMPLETIONS, filled(f'{{{MODEL_JSON},"prompt":[', "200", "]}", 4 * CONTEXT - 200)),
    "stop": (COMPLETIONS, filled(IN_TEXT + '"stop":[', '"a"', "]}")),
    "stop_token_ids": (COMPLETIONS, filled(IN_TEXT + '"stop_token_ids":[', "-1", "]}")),
    "logit_bias": (COMPLETIONS, numbered(IN_TEXT + '"logit_bias":{', '"%d":0', "}}", 300_000)),
    "unknown": (COMPLETIONS, numbered(IN_TEXT, '"%x":0', "}", 300_000)),
    "unknown, as many as may be": (COMPLETIONS, numbered(IN_TEXT, '"%x":0', "}", 1000)),
    "messages": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', MESSAGE, "]}")),
    "messages of numbers": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', "0", "]}")),
    "messages, as many as may be": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', MESSAGE, "]}", 29 * 2048)),
    "messages, all wrong": (CHAT, filled(f'{{{MODEL_JSON},"messages":[', '{"role":0}', "]}", 11 * 2048)),
    "parts": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[', f'{{"role":"user","content":[{",".join([PART] * 256)}]}}', "]}"
        ),
    ),
    "parts, as many as may be": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[',
            f'{{"role":"user","content":[{",".join([PART] * 256)}]}}',
            "]}",
            63 * 6800,
        ),
    ),
    "turns of one role, as many as may be": (
        MESSAGES,
        filled(f'{{{MODEL_JSON},"max_tokens":1,"messages":[', MESSAGE, "]}", 29 * 2048),
    ),
    "blocks, as many as may be": (
        MESSAGES,
        filled(
            f'{{{MODEL_JSON},"max_tokens":1,"messages":[',
            f'{{"role":"user","content":[{",".join([PART] * 256)}]}}',
            "]}",
            63 * 6800,
        ),
    ),
    "metadata": (CHAT, numbered(IN_CHAT + '"metadata":{', '"%x":""', "}}", 300_000)),
    "modalities": (CHAT, filled(IN_CHAT + '"modalities":[', '"text"', "]}", 8 * 65_000)),
    "annotations": (
        CHAT,
        filled(f'{{{MODEL_JSON},"messages":[{{"role":"assistant","content":"","annotations":[', "0", "]}]}"),
    ),
    "tools": (RESPONSES, filled(IN_RESPONSE + '"tools":[', "{}", "]}")),
    "include": (RESPONSES, filled(IN_RESPONSE + '"include":[', '"web_search_call.results"', "]}")),
    "input of numbers": (RESPONSES, filled(f'{{{MODEL_JSON},"input":[', "0", "]}")),
    "input, as much as may be": (RESPONSES, filled(f'{{{MODEL_JSON},"input":[', MESSAGE, "]}", 29 * 2048)),
    "items": ("/v1/conversations", filled('{"items":[', MESSAGE, "]}")),
    "tokens": ("/detokenize", filled('{"tokens":[', "200", "]}")),
    "tokens, as many as are counted": ("/detokenize", filled('{"tokens":[', "1", "]}", 2 * MOST_VALUES)),
    "prompt of as many numbers as are counted": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', "0", "]}", 2 * MOST_VALUES),
    ),
    "tokens to locate": ("/v1/prefixes/locate", filled('{"tokens":[', "200", "]}", 4 * CONTEXT - 200)),
    "depth": (CHAT, b'{"messages":' + b"[" * 4_000_000),
    "quotes": (CHAT, b'{"user":"' + b'\\"' * 2_000_000 + b'"}'),
    "empty texts": (CHAT, filled('{"user":[', '""', "]}")),
    "commas and brackets in texts": (CHAT, filled('{"user":[', '"[,[,[,"', "]}")),
    "long text": (
        COMPLETIONS,
        f'{{{MODEL_JSON},"prompt":"{LONG}"}}'.encode(),
    ),
    "long message": (
        CHAT,
        f'{{{MODEL_JSON},"messages":[{{"role":"user","content":"{LONG}"}}]}}'.encode(),
    ),
    "long text, spelt": (
        "/tokenize",
        f'{{"return_token_strs":true,"prompt":"{LONG}"}}'.encode(),
    ),
    "long input": (
        RESPONSES,
        f'{{{MODEL_JSON},"input":"{LONG}"}}'.encode(),
    ),
    "texts to embed": (EMBEDDINGS, filled(f'{{{MODEL_JSON},"input":[', f'"{SHORT}"', "]}", MANY_BYTES)),
    "empty texts to embed": (EMBEDDINGS, filled(f'{{{MODEL_JSON},"input":[', '"a"', "]}", 4 * 1024)),
    "tokens to embed": (
        EMBEDDINGS,
        filled(f'{{{MODEL_JSON},"input":[', f"[{','.join(['9'] * 507)}]", "]}", MANY_BYTES),
    ),
    "texts to rank": (
        "/rerank",
        filled(f'{{{MODEL_JSON},"query":"a","documents":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "texts to compare": (
        "/score",
        filled(f'{{{MODEL_JSON},"text_1":"a","text_2":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "texts to embed for Ollama": (
        "/api/embed",
        filled(f'{{{MODEL_JSON},"input":[', f'"{SHORT}"', "]}", MANY_BYTES),
    ),
    "prompts, as many as may be": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"prompt":[', f'"{SHORT * 16}"', "]}", MANY_BYTES),
    ),
    "prompts with bad words": (
        COMPLETIONS,
        filled(PROMPTS + '"bad_words":[', f'"{WORD}"', "]}", 64 * 240),
    ),
    "prompts with biases": (COMPLETIONS, numbered(PROMPTS + '"logit_bias":{', '"%d":0', "}}", 200)),
    "prompts with allowed tokens": (
        COMPLETIONS,
        filled(PROMPTS + '"allowed_token_ids":[', "9", "]}", 2 * 16_000),
    ),
    "prompts of tokens, echoed": (
        COMPLETIONS,
        filled(f'{{{MODEL_JSON},"echo":true,"prompt":[', f"[{','.join(['99'] * 5_000)}]", "]}", 64 * 15_010),
    ),
    "calls, as many as may be": (
        CHAT,
        filled(
            f'{{{MODEL_JSON},"messages":[',
            f'{{"role":"assistant","tool_calls":[{",".join([CALL] * 128)}]}}',
            "]}",
            72 * 8000,
        ),
    ),
    "choices, as many as may be": (
        CHAT,
        numbered(IN_CHAT + '"structured_outputs":{"choice":[', '"%d"', "]}}", 1024),
    ),
    "a long message, counted": (
        "/v1/messages/count_tokens",
        f'{{{MODEL_JSON},"messages":[{{"role":"user","content":"{LONG}"}}]}}'.encode(),
    ),
    "too long a text": (COMPLETIONS, f'{{{MODEL_JSON},"prompt":"{"a" * 4_000_000}"}}'.encode()),
    "questions": (DECISIONS, filled(f'{{{MODEL_JSON},"input":"Hi","questions":[', QUESTION, "]}")),
    "questions, as many as may be": (
        DECISIONS,
        filled(
            f'{{{MODEL_JSON},"input":"{LONG[:20_000]}","questions":[',
            QUESTION,
            "]}",
            20_000 + 400 * (len(QUESTION) + 1),
        ),
    ),
    "choices": (
        DECISIONS,
        numbered(IN_QUESTIONS, CHOICES % ",".join(f'{{"value":"{i:03}"}}' for i in range(255)), "]}", 16),
    ),
    "long choices": (
        DECISIONS,
        numbered(
            IN_QUESTIONS, CHOICES % ",".join(f'{{"value":"{i}{"a" * 15_000}"}}' for i in range(255)), "]}", 1
        ),
    ),
    "criteria": (
        "/v1/systemone",
        numbered(
            f'{{{MODEL_JSON},"state":{{}},"questions":{{', '"%d":{"type":"noul","instructions":[]}', "}}", 400
        ),
    ),
}


class Watch:
    """For how long the loop, and the interpreter, were held at most; in seconds of processor time."""

    def __init__(self) -> None:
        self.loop_s = self.piece_s = 0.0
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            started_s = time.thread_time()
            run(handle)
            self.loop_s = max(self.loop_s, time.thread_time() - started_s)

        ticking = threading.Thread(target=self._tick)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.Handle, "_run", timed)
            ticking.start()
            try:
                yield
            finally:
                self._over.set()
                ticking.join()

    def _tick(self) -> None:
        last_s = time.process_time()
        while not self._over.wait(0.0005):
            now_s = time.process_time()
            self.piece_s = max(self.piece_s, now_s - last_s)
            last_s = now_s


@contextlib.asynccontextmanager
async def answering(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine that says one word to everything."""

    async def answer() -> None:
        while True:
            gateway.answer(await gateway.taken(), "ok")
            await asyncio.sleep(0)

    task = asyncio.create_task(answer())
    try:
        async with client(gateway.app) as http:
            yield http
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def gateway_of_a_long_context() -> Gateway:
    roomy = LanePolicy(max_requests=10_000, max_tokens=10**8, max_bytes=2**32)
    gateway = Gateway(
        ServiceOptions(models=(MODEL,)), tokenizer=make_tokenizer(), bounds={Lane.STANDARD: roomy}
    )
    gateway.engine.max_sequence_tokens = CONTEXT
    return gateway


async def send(http: httpx.AsyncClient, path: str, body: bytes) -> int:
    reply = await http.post(path, content=body, headers={"content-type": "application/json"})
    return reply.status_code


async def plain_s(http: httpx.AsyncClient) -> float:
    """Returns the processor time of one plain request, client included."""
    body, times = orjson.dumps(chat_body()), 20
    started_s = time.process_time()
    for _ in range(times):
        assert await send(http, CHAT, body) == 200
    return (time.process_time() - started_s) / times


async def least(times: int, measure: Callable[[], Any]) -> tuple[float, float]:
    """Each figure's least: what is there every time is the code's doing."""
    found = [await measure() for _ in range(times)]
    return min(loop_s for loop_s, _ in found), min(piece_s for _, piece_s in found)


MEMORY = Path("/proc/self")


def peak_bytes() -> int:
    """The most memory that was in use since `forget_peak`; only Linux knows."""
    if not (MEMORY / "clear_refs").exists():
        return 0
    lines = (MEMORY / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def forget_peak() -> int:
    """The memory in use, from which on peaks count; what is free is given back, to be counted if it is taken again."""
    gc.collect()
    if (MEMORY / "clear_refs").exists():
        ctypes.CDLL(None).malloc_trim(0)
        (MEMORY / "clear_refs").write_text("5")
    return peak_bytes()


@pytest.mark.parametrize("name", CORPUS)
async def test_no_body_holds_the_server_up_or_takes_many_times_its_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = CORPUS[name]
    assert len(body) <= MAX_BYTES
    most = TIMES_ITS_SIZE * len(body) + SPARE_BYTES

    async def measure() -> tuple[float, float]:
        watch = Watch()
        with watch.watching(monkeypatch):
            assert await send(http, path, body) in (200, 400)
        return watch.loop_s, watch.piece_s

    async with answering(gateway_of_a_long_context()) as http:
        unit_s = await plain_s(http)
        before = forget_peak()
        loop_s, piece_s = await measure()
        taken = peak_bytes() - before
        if taken > most:  # perhaps another thread's
            before = forget_peak()
            await measure()
            taken = peak_bytes() - before
        if loop_s > HELD_BY_LOOP * unit_s or piece_s > HELD_IN_ONE_PIECE * unit_s:
            loop_s, piece_s = await least(4, measure)
    print(f"{name}: loop {loop_s * 1e3:.1f} ms, piece {piece_s * 1e3:.1f} ms, plain {unit_s * 1e3:.2f} ms")
    print(f"{taken / len(body):.1f} times its {len(body)} bytes")
    assert taken <= most
    assert loop_s <= HELD_BY_LOOP * unit_s
    assert piece_s <= HELD_IN_ONE_PIECE * unit_s


NUM_CHOICES, NUM_TOKENS = 16, 400


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_answer_holds_the_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of tens of megabytes, in one piece for its client."""
    gateway, watch = gateway_of_a_long_context(), Watch()
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    fields: dict[str, Any] = {"n": NUM_CHOICES, "max_tokens": NUM_TOKENS, **wanted}
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    found = logprobs(*((token_id, -0.1 * token_id) for token_id in range(5, 25)))
    async with answering(gateway) as http:
        unit_s = await plain_s(http)
    async with client(gateway.app) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        request = await gateway.taken()
        for index in range(NUM_CHOICES):
            token_ids, many = [7] * NUM_TOKENS, [found] * NUM_TOKENS
            gateway.finish(request, "x", index, token_ids=token_ids, logprobs=many)
        gc.collect()
        with watch.watching(monkeypatch):
            reply = await asking
    choices = orjson.loads(reply.content)["choices"]
    assert [len(str(choice["logprobs"])) > 10**5 for choice in choices] == [True] * NUM_CHOICES
    print(f"{len(reply.content)} bytes: loop {watch.loop_s * 1e3:.1f} ms, plain {unit_s * 1e3:.2f} ms")
    assert watch.loop_s <= HELD_BY_LOOP * unit_s


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 400}, "max_completion_tokens"),
        (COMPLETIONS, {"logprobs": 20, "max_tokens": 400}, "max_tokens"),
    ],
)
async def test_an_answer_in_one_piece_is_bounded(path: str, fields: dict[str, Any], param: str) -> None:
    gateway = gateway_of_a_long_context()
    body = chat_body(n=128, **fields) if path == CHAT else completion_body(n=128, **fields)
    async with client(gateway.app) as http:
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        asking = asyncio.create_task(http.post(path, json={**body, "stream": True}))
        assert (await gateway.taken()).sampling.max_tokens == 400
        del body[param]
        asking_all = asyncio.create_task(http.post(path, json=body))
        most = Limits().max_logprobs // (128 * 21)
        assert (await gateway.taken()).sampling.max_tokens == (most if path == CHAT else 16)
        for task in (asking, asking_all):
            task.cancel()
        await asyncio.gather(asking, asking_all, return_exceptions=True)
