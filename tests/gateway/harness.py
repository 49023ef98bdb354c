"""A gateway with the engine's side in the test's hands: which step brings what, and when.

The queue and the tokenizer are real; the engine is a double, so that time and faults are the test's to choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import tokenizers
import uvicorn
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers, processors

from penstock.app.listen import bind
from penstock.engine.engine import EngineState, EngineStats
from penstock.engine.planning.block_map import BlockMap, block_map
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.engine.planning.state_records import StateUse
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.planning.timings import Timings
from penstock.engine.text.grammars import Grammars
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.tiers.tiers import TiersUse
from penstock.gateway.app import create_app
from penstock.gateway.dispatch import Tracing
from penstock.gateway.http.protocol import GatewayProtocol
from penstock.gateway.service import Service, ServiceOptions
from penstock.gateway.store.interface import Store
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.wire.prompts import Prompts
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.queue import LaneQueue
from tests.clock import Clock

MODEL = "fake"
EOS = 1
SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


@cache
def tokenizer_json() -> str:
    """Byte-level, without merges: one token a byte, and five special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer.to_str()


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    return Tokenizer(tokenizer_json(), config, template)


class FakeEngine:
    """Remembers what it was told. `on_wake` is called when there may be work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.state = EngineState.READY
        self.error: str | None = None
        self.last_progress_s = clock()
        self.max_sequence_tokens = 512
        self.max_kept_tokens = 4096
        self.cancelled: list[str] = []
        self.ref_counts = [0] * 33
        """By KV block; block 0 is none. Without any there is no pool, for now."""
        self.findable = bytearray(33)
        self.states = StateUse()
        self.tiers = TiersUse()
        self.on_wake: Callable[[], None] = lambda: None

    def longest(self, keeping: Keeping | None) -> int:
        return self.max_sequence_tokens if keeping is None else self.max_kept_tokens

    def wake(self) -> None:
        self.on_wake()

    def expect(self, requests: Sequence[Request]) -> None:
        """There are no tiers."""

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def find_cached(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0

    def unfilled_kv(self) -> float:
        return 0.25

    def stats(self) -> EngineStats:
        return EngineStats(
            num_blocks=32,
            num_free_blocks=32,
            num_kv_tokens=512,
            num_free_tokens=512,
            max_batch_tokens=512,
            max_num_seqs=8,
            states=self.states,
            tiers=self.tiers,
        )

    def block_map(self) -> BlockMap | None:
        return block_map(self.ref_counts, self.findable) if self.ref_counts else None


class Gateway:
    """One service, and what an engine would do with its requests."""

    def __init__(
        self,
        options: ServiceOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        bounds: dict[Lane, LanePolicy] | None = None,
        clock: Callable[[], float] | None = None,
        store: Store | None = None,
        traces: Tracing | None = None,
    ) -> None:
        self.clock = Clock()
        used = clock or self.clock
        tokenizer = tokenizer or make_tokenizer()
        self.engine = FakeEngine(used)
        self.queue = LaneQueue(threading.Lock(), {**DEFAULT_POLICIES, **(bounds or {})})
        self.sink = TextSink(tokenizer, (EOS,))
        self.grammars = Grammars(tokenizer, (EOS,))
        self.service = Service(
            self.engine,
            self.queue,
            Prompts(tokenizer),
            options or ServiceOptions(models=(MODEL,)),
            sink=self.sink,
            store=store or MemoryStore(used),
            grammars=self.grammars,
            clock=used,
            traces=traces,
        )
        self.app = create_app(self.service)
        self._arrived = asyncio.Event()
        self.engine.on_wake = self._arrived.set

    async def taken(self) -> Request:
        """The next request, as soon as one is queued; from here on the engine holds it."""
        while (request := self.queue.take(lambda _: True)) is None:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 10)
        return request

    async def queued(self, number: int = 1) -> None:
        """Returns when so many requests wait."""
        while sum(self.queue.depths().values()) < number:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 10)

    def deliver(self, *outputs: Output, **fields: Any) -> None:
        self.service.deliver(step_report(*outputs, **fields))

    def bring(self, request: Request, text: str, index: int = 0, **fields: Any) -> None:
        """One step with one token for one choice."""
        self.deliver(self.output(request, text, index, **fields))

    def output(self, request: Request, text: str, index: int = 0, **fields: Any) -> Output:
        token_ids = fields.pop("token_ids", [7])
        return Output(request_id=request.request_id, index=index, text=text, token_ids=token_ids, **fields)

    def finish(
        self,
        request: Request,
        text: str = "",
        index: int = 0,
        reason: FinishReason = FinishReason.STOP,
        **fields: Any,
    ) -> None:
        timings = make_timings(request)
        num_prompt = request.num_prompt_tokens
        self.queue.charge([(request, num_prompt, 1, num_prompt + 1)], timings.first_token_s)
        self.bring(request, text, index, finish_reason=reason, timings=timings, **fields)

    def answer(self, request: Request, *texts: str) -> None:
        """Every choice gets a token a text, and ends."""
        if request.branches:
            self.score(request)
            return
        for text in texts[:-1]:
            self.deliver(*(self.output(request, text, index) for index in range(request.n)))
        for index in range(request.n):
            self.finish(request, texts[-1], index)

    async def answering(self, asking: Awaitable[Any], *texts: str) -> Any:
        """Awaits a call of a client while the engine answers it."""
        reply = asyncio.ensure_future(asking)
        self.answer(await self.taken(), *texts)
        return await reply

    def prompt_of(self, request: Request) -> str:
        """The text of a prompt, with its special tokens."""
        return self.service.tokenizer.decode(request.prompt_token_ids, skip_special=False)

    def score(self, request: Request, *scores: list[float]) -> None:
        """Ends all branches in one step, with log probabilities of their candidates."""
        told = scores or [[-1.0] * len(branch.candidates) for branch in request.branches]
        ended = {"finish_reason": FinishReason.LENGTH, "timings": make_timings(request), "token_ids": []}
        self.deliver(*(self.output(request, "", i, scores=own, **ended) for i, own in enumerate(told)))

    async def left(self) -> None:
        """Returns when no stream is there any more."""
        assert await self.service.dispatch.drained(10)


async def settled() -> None:
    """Every task that could go on has gone on: without sockets, a few turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


def make_timings(request: Request, **fields: Any) -> Timings:
    timings = Timings(
        arrival_s=request.arrival_s,
        scheduled_s=request.arrival_s + 0.010,
        first_token_s=request.arrival_s + 0.030,
        finished_s=request.arrival_s + 0.070,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=4,
        num_output_tokens=3,
        preempted_s=[request.arrival_s + 0.050],
    )
    return replace(timings, **fields)


def step_report(*outputs: Output, **fields: Any) -> StepReport:
    values: dict[str, Any] = {
        "started_s": 1000.0,
        "duration_s": 0.004,
        "num_prefill_tokens": 0,
        "num_decode_tokens": len(outputs),
        "num_running": len(outputs),
        "num_waiting": 0,
        "num_blocks": 32,
        "num_free_blocks": 24,
        "num_preemptions": 0,
        "num_prefix_query_tokens": 0,
        "num_prefix_hit_tokens": 0,
    }
    return StepReport(outputs=list(outputs), **{**values, **fields})


def logprobs(*pairs: tuple[int, float]) -> TokenLogprobs:
    """The first pair is the chosen token."""
    return TokenLogprobs(logprob=pairs[0][1], top=tuple(sorted(pairs, key=lambda pair: -pair[1])))


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, protocol: type[GatewayProtocol] = GatewayProtocol) -> AsyncIterator[str]:
    """The app on a real port, in this event loop."""
    with bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(
            app, http=protocol, log_level="critical", ws="none", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def client(app: ASGIApp) -> httpx.AsyncClient:
    """Calls the app without a socket; replies come in one piece."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://penstock")


def chat_body(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion_body(prompt: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def events(body: str) -> list[Any]:
    """The data of all events; the end mark stays text."""
    data = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
