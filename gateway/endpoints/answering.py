"""The answer to a request: it is let in, its prompts are made, and its reply begins, live or recorded."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.engine.planning.request import Request
from penstock.gateway.access.idempotency import HEADER, RESUMABLE_HEADER, idempotency_key
from penstock.gateway.endpoints.intake import Arrival, Endpoints, Intake
from penstock.gateway.endpoints.replies import Sender, live
from penstock.gateway.endpoints.requests import FREE, Guidance, RequestMaker
from penstock.gateway.endpoints.scoring import Scoring
from penstock.gateway.errors import invalid, unsupported
from penstock.gateway.http.json_response import Json
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.live import Live
from penstock.gateway.service import Service
from penstock.gateway.sessions.chats import keep
from penstock.gateway.sessions.owners import owned_id
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.threads import NO_THREAD, Thread
from penstock.gateway.wire.ask import Ask, Input, Turn
from penstock.gateway.wire.labels import Steps
from penstock.gateway.wire.questions import Questions
from penstock.gateway.wire.sampling import SEARCH_FIELDS, check_beams
from penstock.gateway.wire.strict import Body
from penstock.gateway.wire.writing import Counts, Head, WholeWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The requests of an arrival, and what is known of their answers."""

    requests: list[Request]
    guidance: Guidance = FREE
    echoes: Sequence[str] = ()
    """The texts of the prompts, if choices begin with them."""
    steps: Sequence[Sequence[Steps]] = ()
    """The steps of each question's labels."""


MakeWriter = Callable[[Head, Arrival, Made], WholeWriter[Counts]]
"""Makes the writer of a reply; where the ask may stream, it is a `Writer`."""


class Recorder(ABC):
    """An API's way of recording replies."""

    kind: str
    prefix: str
    """The beginning of its ids."""
    num_digits: int
    always = False
    """Whether every reply is recorded."""

    def thread(self, came: Arrival) -> AbstractAsyncContextManager[Thread]:  # noqa: ARG002
        """Holds the thread that a turn continues until its recording has begun."""
        return contextlib.nullcontext(NO_THREAD)

    @abstractmethod
    def details(self, came: Arrival, made: Made, thread: Thread, head: Head) -> dict[str, Any]:
        """Returns what a recording has to know of its request, as JSON."""

    @abstractmethod
    def reply(self, recording: Recording, body: Any) -> Response: ...

    @abstractmethod
    async def repeat(self, tenant: str, reply_id: str, body: Any) -> Response:
        """Returns the reply to a request that was sent before."""


class Answering:
    """Answers the requests for one service's model."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake
        self._maker = RequestMaker(service, intake.ignore)
        self._scoring = Scoring(service, self._maker)

    async def answer(
        self,
        http: HttpRequest,
        kind: type[Body],
        write: MakeWriter,
        prefix: str,
        recorder: Recorder | None = None,
        load: Callable[[Ask], dict[str, object]] = lambda _: {},
    ) -> Response:
        """Answers a request whose body is of a kind.

        Args:
            prefix: the beginning of the reply's id.
            load: returns the reply to an ask for nothing but that the model be loaded.

        Raises:
            ApiError: 4xx or 503, for everything that a request may be refused for.
        """
        came = await self._intake.begin(http, kind)
        ask = came.ask
        self._check(ask)
        if not ask.input:
            return Json(load(ask))
        key = None if recorder is None else idempotency_key(http)
        outlives = recorder is not None and (
            key is not None or ask.kept.background or _is_resumable(http, ask)
        )
        if recorder is None or not (recorder.always or outlives):
            return await self._live(came, write, prefix + secrets.token_hex(16))
        check_recordable(ask, recorder, key)
        came = replace(came, is_recorded=True)
        reply_id = owned_id(recorder.prefix, self._service.tag, recorder.num_digits)
        start = partial(self._recording, came, recorder, reply_id, outlives)
        recording = await self._service.idempotency.once(came.tenant.name, key, came.body, reply_id, start)
        if isinstance(recording, str):
            return await recorder.repeat(came.tenant.name, recording, came.body)
        return recorder.reply(recording, came.body)

    async def _live(self, came: Arrival, write: MakeWriter, reply_id: str) -> Sender:
        self._check_room(came)
        ask, made = came.ask, await self._made(came, reply_id)
        stored = ask.kept.stored
        reply = Live(
            made.requests,
            await self._intake.reserve(came.client, made.requests),
            write(self._head(ask, reply_id), came, made),
            streamed=ask.streams,
            thoughts=self._service.formats.thoughts(made.guidance.reading),
            echoes=made.echoes,
            in_full=ask.shown.extras.token_ids or ask.shown.usage_so_far,
            keeps=ask.streams and (ask.kept.output or stored is not None),
        )
        keep_whole = None if stored is None else partial(keep, self._service.store, came.tenant.name, stored)
        return live(self._service, reply, keep_whole)

    async def _recording(self, came: Arrival, recorder: Recorder, reply_id: str, outlives: bool) -> Recording:
        self._check_room(came)
        kept, head = came.ask.kept, self._head(came.ask, reply_id)
        async with recorder.thread(came) as thread:
            made = await self._made(came, reply_id, thread)
            return await self._service.recordings.start(
                made.requests[0],
                kind=recorder.kind,
                details=recorder.details(came, made, thread, head),
                created=head.created,
                detachable=outlives,
                journalled=outlives,
                max_detached_s=None if kept.background else self._service.options.timeouts.detached_s,
                reservation=await self._intake.reserve(came.client, made.requests),
            )

    async def _made(self, came: Arrival, reply_id: str, thread: Thread = NO_THREAD) -> Made:
        ask, prompting = came.ask, self._intake.prompting(came.tenant, came.urgency.lane)
        if isinstance(ask.input, Questions):
            request, steps = await self._scoring.request(came, ask.input, prompting, reply_id)
            return Made(requests=[request], steps=steps)
        answer = await self._maker.answer_grammar(came)
        prompts = await prompting.prompts(ask, thread)
        guidance = await self._maker.guidance(came, prompting, prompts[0], answer)
        ids = [reply_id] if came.is_recorded else [f"{reply_id}-{i}" for i in range(len(prompts))]
        requests = await self._maker.requests(came, dict(zip(ids, prompts, strict=True)), guidance)
        echoes = await self._echoes(ask.input, prompts) if ask.shown.echo else ()
        return Made(requests=requests, guidance=guidance, echoes=echoes)

    async def _echoes(self, given: Input, prompts: list[list[int]]) -> Sequence[str]:
        """Returns the text of each prompt: as it was sent, or spelt out."""
        assert isinstance(given, tuple)
        if texts := given[0].texts:
            return texts
        decode = partial(self._service.tokenizer.decode, skip_special=False)
        return await off_loop(TOKEN_BYTES * sum(map(len, prompts)), lambda: list(map(decode, prompts)))

    def _check(self, ask: Ask) -> None:
        self._intake.check_model(ask.model)
        if ask.sampling is not None and ask.sampling.model_fields_set & SEARCH_FIELDS:
            check_beams(ask.sampling, self._most_beams if ask.sampling.use_beam_search else 0)
        size = self._service.options.embedding.size
        if ask.dimensions is not None and size is not None and ask.dimensions > size:
            raise invalid(f"'dimensions' may be at most {size} for this model.", "dimensions")

    @property
    def _most_beams(self) -> int:
        return min(self._service.options.limits.max_beams, self._service.engine_stats().max_num_seqs)

    def _check_room(self, came: Arrival) -> None:
        """Raises 429 or 503 if no prompt that the ask may have is let in, before it is tokenised."""
        dispatch = self._service.dispatch
        most = dispatch.context_length if isinstance(came.ask.input, Turn) else came.num_bytes
        dispatch.check_room(came.urgency, came.tenant.name, came.at_s, most)

    def _head(self, ask: Ask, reply_id: str) -> Head:
        fingerprint = self._service.options.system_fingerprint
        return Head(id=reply_id, created=int(time.time()), model=ask.model, system_fingerprint=fingerprint)


def _is_resumable(http: HttpRequest, ask: Ask) -> bool:
    """Returns whether a reply is to be resumable; raises 400 for a header that says neither yes nor no."""
    header = http.headers.get(RESUMABLE_HEADER, "false")
    if header not in ("true", "false"):
        raise invalid(f"'{RESUMABLE_HEADER}' must be 'true' or 'false'.", RESUMABLE_HEADER)
    return header == "true" or ask.kept.resumable


def check_recordable(ask: Ask, recorder: Recorder, key: str | None) -> None:
    """Raises 400 if something is asked for that recordings do not have."""
    way = "a resumable stream" if key is None else f"the header '{HEADER}'"
    body, shown = ask.sampling, ask.shown
    assert body is not None
    unfit = {
        "use_beam_search": body.use_beam_search,
        "best_of": body.num_generated > (body.n or 1),
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": body.return_token_ids,
        "return_tokens_as_token_ids": body.return_tokens_as_token_ids,
        "stream_options.continuous_usage_stats": shown.usage_so_far,
        "functions": shown.extras.functions,
        "echo": shown.echo,
    }
    field = next((field for field, is_unfit in unfit.items() if is_unfit), None)
    if field is not None and recorder.always:
        raise unsupported(field)
    if field is not None:
        raise invalid(f"'{field}' cannot be used together with {way}.", field)
    if ask.num_prompts > 1:
        raise invalid(f"There can only be one prompt together with {way}.", ask.field)


class ModelEndpoints(Endpoints):
    """Some endpoints whose requests go to the model."""

    def __init__(self, service: Service, intake: Intake, answering: Answering) -> None:
        super().__init__(service, intake)
        self._answer = answering.answer
