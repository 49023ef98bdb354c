"""`from penstock import LLM`: the server's engine, lanes and caches inside a program of one's own, without HTTP.

The engine has a thread of its own, so a call blocks nobody but its caller, and works beside an event loop that runs
already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import count
from math import inf
from queue import SimpleQueue
from typing import Any, Literal, Self

from jinja2 import TemplateSyntaxError
from typing_extensions import TypedDict, Unpack

from app.build import build_core, load_options
from app.errors import OperatorError, describe_failure
from app.kernels import check_level
from app.log import counter, silent
from app.log import progress as progress_bar
from app.settings import Settings, load_settings
from engine.engine import EngineState
from engine.planning.grammar import Grammar
from engine.planning.grammars import GrammarError
from engine.planning.request import FinishReason, Output, Request, SamplingParams
from engine.planning.step import StepReport
from gateway.access.keys import OPEN_TENANT
from gateway.endpoints.completions import DEFAULT_COMPLETION_TOKENS
from gateway.endpoints.intake import bad_words_of, salt_of
from gateway.http.errors import ApiError, invalid
from gateway.http.limits import Limits
from gateway.wire.beams import NEUTRAL, beam_tokens, beams_of, check_beams
from gateway.wire.conversation import as_dict
from gateway.wire.embeddings import EmbeddingsBody, shortened
from gateway.wire.prompts import Prompts, check_token_ids
from gateway.wire.sampling import MaxTokens, Room, lane_of, sampling_params
from gateway.wire.schemas import (
    ChatBody,
    CompletionBody,
    check_chat,
    check_completion,
    read,
)
from gateway.wire.structured import answer_form, form_of
from priority.lanes import DEFAULT_POLICIES

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages as OpenAI has them: `{"role": "user", "content": "Hello!"}`."""

SERVER_ONLY = frozenset(
    {
        "served_model_name", "host", "port", "api_keys_file", "cors_origins", "allowed_hosts", "redis_url", "replica",
        "warm_up_tokens", "drain_timeout", "metrics_port", "metrics_compat", "otlp_endpoint", "log_level", "log_format",
        "access_log",
    }
)  # fmt: skip
"""Settings that mean nothing here."""

_LIMITS = Limits()
_STOP_S = 5.0
"""A step that hangs must not keep the program."""


def _nobody() -> None:
    pass


class Sampling(TypedDict, total=False):
    """How tokens are chosen: OpenAI's names and ranges, and those that clients of open models send."""

    max_tokens: int
    max_completion_tokens: int
    """The newer name of max_tokens, for chats."""
    temperature: float
    top_p: float
    n: int
    """Choices of each prompt."""
    seed: int
    stop: str | list[str]
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | bool
    """For prompts, how many of the most likely tokens to name beside the chosen one; for chats, whether to at all."""
    top_logprobs: int
    """For chats, how many."""
    service_tier: str
    """The lane: priority, default or flex."""
    top_k: int
    min_p: float
    typical_p: float
    top_a: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    bad_words: list[str]
    allowed_token_ids: list[int]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    use_beam_search: bool
    """The `n` likeliest answers as a whole, best first; all of each come at the end."""
    length_penalty: float
    early_stopping: bool | Literal["never"]
    response_format: Mapping[str, Any]
    """What answers have to match: {"type": "json_object"}, or a json_schema."""
    structured_outputs: Mapping[str, Any]
    """The same in vLLM's words: json, regex, choice or grammar."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, and how likely it was before any of the sampling's processing."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely ones in its place, best first."""


@dataclass(slots=True)
class Choice:
    """One text that was generated."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop or length."""
    logprobs: list[TokenLogprob] | None = None
    """By token, if they were asked for."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs


@dataclass(slots=True)
class Piece:
    """What is new of one choice."""

    prompt: int
    """The number of its prompt or conversation in the list that was given."""
    choice: int
    text: str
    """Whole characters; may be empty while one is incomplete, or could become a stop string."""
    token_ids: list[int]
    finish_reason: str | None
    """stop or length with the last piece of a choice, else None."""
    logprobs: list[TokenLogprob] | None


@dataclass(slots=True)
class Answer:
    """What came of one prompt or conversation."""

    prompt_token_ids: tuple[int, ...]
    choices: list[Choice]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class LLM:
    """A model that is loaded in this process.

    Its methods may be called from several threads; their requests then share the engine's steps, as a server's do.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, progress: bool = True, **settings: object
    ) -> None:
        """Loads the model, and returns once it is ready.

        Args:
            model: a directory, a GGUF file or a Hugging Face id; without it, the demo model.
            progress: show bars while the model is loaded and while answers are generated.
            settings: as `penstock serve --help` has them, `max_model_len=4096` say; what is not given comes from
                `PENSTOCK_*` variables, a `config` file, or the defaults.

        Raises:
            TypeError: there is no such setting.
            ValueError: a setting, a path or a checkpoint is wrong.
            RuntimeError: the model cannot be loaded.
        """
        self._progress = progress
        self._ids = map("offline-{}".format, count())
        desk = self._desk = _Desk()
        show = progress_bar if progress else silent
        try:
            check_level()
            chosen = _settings(model, settings)
            core = build_core(chosen, desk.deliver, desk.announce, show=show)
            self._block_size = load_options(chosen).block_size
            self._prompts = Prompts(core.tokenizer)
        except OperatorError as error:
            raise ValueError(str(error)) from None
        except TemplateSyntaxError as error:
            raise ValueError(f"{core.folder}: the chat template is broken: {error}") from None
        self._core, self._engine, self._queue = core, core.engine, core.queue
        self._vocab_size = min(core.config.vocab_size, core.tokenizer.vocab_size)
        core.engine.start()
        # Also when it is forgotten, and at the program's end: a thread inside torch does not survive the interpreter.
        self._stop = weakref.finalize(self, core.engine.stop, _STOP_S)
        desk.settled.wait()
        if core.engine.failure is not None:
            raise RuntimeError(describe_failure(core.engine.failure, core.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and frees the model. Calls that run in other threads end with an error."""
        self._stop()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        progress: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Answer]:
        """Completes one prompt or many; the answers are in the order of the prompts.

        Args:
            progress: whether to show a bar; None is as the LLM was told.
            sampling: for all prompts. As at `/v1/completions`, an answer has 16 tokens unless max_tokens says more.

        Raises:
            TypeError, ValueError: an argument is wrong; nothing was generated.
            RuntimeError: the engine failed, or was closed.
        """
        return self._answers(self._requests(self._of_prompt, _listed(prompts), _checked(sampling)), progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        *,
        progress: bool | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Answer]:
        """Answers one conversation or many, by the model's chat template.

        Without max_tokens an answer may fill the context. All else is as with `generate`.
        """
        requests = self._requests(self._of_conversation, _listed(conversations), _checked(sampling))
        return self._answers(requests, progress)

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool | None = None
    ) -> list[list[float]]:
        """The embeddings of texts, or of token ids, made as the checkpoint's own files say.

        Args:
            dimensions: numbers of each; None is all of them.
        """
        embedding = self._core.embedding
        if dimensions is not None and not 1 <= dimensions <= (embedding.size or dimensions):
            raise ValueError(f"'dimensions' must be 1 to {embedding.size} for this model.")
        requests = self._requests(self._of_input, _listed(texts), {})
        embeddings: list[list[float]] = [[] for _ in requests]
        with self._asked(requests) as call, self._shown(progress)("embedding", len(requests)) as update:
            for num_done, (number, output) in enumerate(call, 1):
                embeddings[number] = shortened(
                    output.embedding or [], dimensions, is_normalised=embedding.is_normalised
                )
                update(num_done)
        return embeddings

    def stream(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt] | Sequence[Conversation],
        **sampling: Unpack[Sampling],
    ) -> Stream:
        """The same piece by piece as it comes, for prompts or for conversations. Arguments are checked at once."""
        listed = _listed(prompts)
        is_chat = any(isinstance(part, Mapping) for one in listed[:1] for part in one)
        read_one = self._of_conversation if is_chat else self._of_prompt
        return Stream(self, self._requests(read_one, listed, _checked(sampling)))

    # From arguments to requests

    def _requests(
        self,
        read_one: Callable[[Any, Mapping[str, Any]], Request],
        given: Sequence[Any],
        values: Mapping[str, Any],
    ) -> list[Request]:
        requests = []
        for number, one in enumerate(given):
            try:
                requests.append(read_one(one, {"model": "-", **values}))
            except ApiError as error:
                place = f"number {number} of {len(given)}: " if len(given) > 1 else ""
                raise ValueError(place + error.message) from None
        return requests

    def _of_prompt(self, prompt: object, values: Mapping[str, Any]) -> Request:
        body = read(CompletionBody, {**values, "prompt": prompt}, _LIMITS)
        check_completion(body, _LIMITS)
        token_ids = self._token_ids(body.prompt, "prompt")
        room = self._engine.max_sequence_tokens - len(token_ids)
        most = max(1, min(DEFAULT_COMPLETION_TOKENS, room)) if body.max_tokens is None else body.max_tokens
        return self._request(body, token_ids, "prompt", MaxTokens("max_tokens", most), body.logprobs)

    def _of_input(self, text: object, values: Mapping[str, Any]) -> Request:
        body = read(EmbeddingsBody, {**values, "input": text}, _LIMITS)
        token_ids = self._token_ids(body.input, "input")
        self._check_room(token_ids, "input", MaxTokens("max_tokens", 0))
        return Request(
            request_id="",
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(temperature=0.0, max_tokens=0),
            lane=lane_of(body.service_tier, OPEN_TENANT),
            tenant=OPEN_TENANT.name,
            salt=salt_of(OPEN_TENANT),
            pooling=self._core.embedding.pooling,
        )

    def _of_conversation(self, messages: object, values: Mapping[str, Any]) -> Request:
        body = read(ChatBody, {**values, "messages": messages}, _LIMITS)
        check_chat(body, _LIMITS)
        token_ids = self._prompts.chat([as_dict(message) for message in body.messages])
        asked = MaxTokens("max_tokens", body.max_tokens or body.max_completion_tokens)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._request(body, token_ids, "messages", asked, num_logprobs)

    def _request(
        self,
        body: ChatBody | CompletionBody,
        token_ids: list[int],
        name: str,
        asked: MaxTokens,
        num_logprobs: int | None,
    ) -> Request:
        """One without an id; `name` is what its prompt is called."""
        tokenizer, stats = self._core.tokenizer, self._engine.stats()
        check_beams(body, min(_LIMITS.max_beams, stats.max_num_seqs))
        max_tokens = self._check_room(token_ids, name, asked)
        if body.use_beam_search:
            width = body.num_generated
            most = beam_tokens(asked, len(token_ids), width, stats.num_blocks, self._block_size)
            max_tokens = min(max_tokens, most)
        sampling = sampling_params(
            body,
            NEUTRAL if body.use_beam_search else self._core.defaults,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=None,
            bad_words=bad_words_of(tokenizer, body.bad_words or ()),
            shown_special=tokenizer.special_ids if body.skip_special_tokens is False else frozenset(),
            vocab_size=self._vocab_size,
            grammar=self._grammar(body),
        )
        return Request(
            request_id="",
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            n=body.n or 1,
            beams=beams_of(body, self._core.config.eos_token_ids),
            lane=lane_of(body.service_tier, OPEN_TENANT),
            tenant=OPEN_TENANT.name,
            salt=salt_of(OPEN_TENANT),
        )

    def _token_ids(self, prompt: str | Sequence[object], name: str) -> list[int]:
        if isinstance(prompt, str):
            return self._prompts.text(prompt)
        token_ids = [token_id for token_id in prompt if isinstance(token_id, int)]
        if len(token_ids) < len(prompt):
            raise invalid("A prompt is a text or a list of token ids.", name)
        return token_ids

    def _check_room(self, token_ids: list[int], name: str, asked: MaxTokens) -> int:
        """The most output tokens after a prompt; `name` is what it is called."""
        if not token_ids:
            raise invalid(f"'{name}' must not be empty.", name)
        check_token_ids(token_ids, self._vocab_size, name)
        return Room(self._engine.max_sequence_tokens, len(token_ids)).output_tokens(asked, name)

    def _grammar(self, body: ChatBody | CompletionBody) -> Grammar | None:
        form = form_of(body, _LIMITS, answer_form(body.response_format))
        if form is None:
            return None
        try:
            self._core.grammars.compile(OPEN_TENANT.name, form.grammar)
        except GrammarError as error:
            raise invalid(f"Invalid '{form.field}': {error}.", form.field) from None
        return form.grammar

    # From outputs to answers

    def _answers(self, requests: list[Request], progress: bool | None) -> list[Answer]:
        answers = [Answer(r.prompt_token_ids, [Choice() for _ in range(r.n)]) for r in requests]
        choices_left = [request.n for request in requests]
        num_done = 0
        with self._asked(requests) as call, self._shown(progress)("generating", len(requests)) as update:
            for number, output in call:
                answer = answers[number]
                answer.choices[output.index].add(self._piece(number, output))
                if output.timings is not None:
                    answer.num_cached_tokens = max(answer.num_cached_tokens, output.timings.num_cached_tokens)
                    choices_left[number] -= 1
                    num_done += not choices_left[number]
                    update(num_done)
        return answers

    def _shown(
        self, progress: bool | None
    ) -> Callable[[str, int], AbstractContextManager[Callable[[int], None]]]:
        return counter if (self._progress if progress is None else progress) else silent

    def _piece(self, number: int, output: Output) -> Piece:
        logprobs = None
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = [self._token(token_id, found.logprob, found.top) for token_id, found in pairs]
        reason = output.finish_reason and output.finish_reason.value
        return Piece(number, output.index, output.text, output.token_ids, reason, logprobs)

    def _token(self, token_id: int, logprob: float, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
        text = self._core.tokenizer.token_bytes(token_id).decode(errors="replace")
        return TokenLogprob(token_id, text, logprob, tuple(self._token(*other) for other in top))

    @contextlib.contextmanager
    def _asked(self, requests: Iterable[Request], tell: Callable[[], None] = _nobody) -> Iterator[_Call]:
        """Asks the engine; whatever has not ended at the end of the block is cancelled there."""
        now = time.monotonic()
        asked = [replace(request, request_id=next(self._ids), arrival_s=now) for request in requests]
        call = _Call(asked, tell)
        self._desk.calls.update(dict.fromkeys(call.open, call))
        try:
            if self._engine.state is not EngineState.READY:
                raise RuntimeError(self._engine.error or "this LLM is closed")
            for request in asked:
                self._queue.readmit(request, now)  # nothing is refused here, nor expires
            self._engine.wake()
            yield call
        finally:
            for request in asked:
                del self._desk.calls[request.request_id]
            for request_id in call.open:
                if not self._queue.cancel(request_id):
                    self._engine.cancel(request_id)


class Stream:
    """Pieces as they come, of all choices of all prompts: for `for`, and for `async for`.

    Whoever stops reading cancels what is left. Going over it again asks again.
    """

    def __init__(self, llm: LLM, requests: list[Request]) -> None:
        self._llm = llm
        self._requests = requests

    def __iter__(self) -> Iterator[Piece]:
        with self._llm._asked(self._requests) as call:
            for number, output in call:
                yield self._llm._piece(number, output)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)

        with self._llm._asked(self._requests, tell) as call:
            while call.open:
                news.clear()
                for number, output in call.arrived():
                    yield self._llm._piece(number, output)
                if call.open:
                    await news.wait()


class _Call:
    """What came for the requests of one call. `put` is for the step thread, the rest for whoever asked."""

    def __init__(self, requests: Sequence[Request], tell: Callable[[], None]) -> None:
        """`tell` is called on the step thread when there is something to take."""
        self.open = {request.request_id: request.n for request in requests}
        """Choices that have not ended, by request."""
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._outputs: SimpleQueue[Output | None] = SimpleQueue()
        self._tell = tell

    def put(self, output: Output | None) -> None:
        """None: the engine has ended, and nothing more will come."""
        self._outputs.put(output)
        self._tell()

    def __iter__(self) -> Iterator[tuple[int, Output]]:
        """All that comes, with the number of its request; waits for it."""
        while self.open:
            yield self._taken(self._outputs.get())

    def arrived(self) -> Iterator[tuple[int, Output]]:
        """What is there already."""
        while self.open and not self._outputs.empty():
            yield self._taken(self._outputs.get())

    def _taken(self, output: Output | None) -> tuple[int, Output]:
        if output is None:
            raise RuntimeError("the engine ended before the answer did")
        if output.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            raise RuntimeError(output.error or "the engine ended the request")
        if output.finish_reason is not None:
            self.open[output.request_id] -= 1
            if not self.open[output.request_id]:
                del self.open[output.request_id]
        return self._numbers[output.request_id], output


class _Desk:
    """Where the step thread leaves what it has to say."""

    def __init__(self) -> None:
        self.calls: dict[str, _Call] = {}
        """By request."""
        self.settled = threading.Event()
        """The model is loaded, or cannot be."""

    def deliver(self, report: StepReport) -> None:
        for output in report.outputs:
            if (call := self.calls.get(output.request_id)) is not None:
                call.put(output)

    def announce(self, state: EngineState) -> None:
        self.settled.set()
        if state is not EngineState.READY:
            for call in set(self.calls.values()):
                call.put(None)


def _settings(model: str | os.PathLike[str] | None, given: Mapping[str, object]) -> Settings:
    """Lanes that nobody set promise nothing and hold nothing back: what counts here is when all is done."""
    known = Settings.model_fields.keys() - SERVER_ONLY
    for name in given.keys() - known:
        raise TypeError(f"an LLM has no setting {name!r}{_near(name, known)}")
    settings = load_settings(given if model is None else {"model": os.fspath(model), **given})
    lanes = {
        f"lane_{lane.label}": replace(policy, ttft_s=inf, tpot_s=inf, kv_share=1.0)
        for lane, policy in settings.lanes.items()
        if policy == DEFAULT_POLICIES[lane]
    }
    return settings.model_copy(update=lanes)


def _checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError for a name that there is not."""
    for name in sampling.keys() - Sampling.__optional_keys__:
        raise TypeError(f"unexpected keyword argument {name!r}{_near(name, Sampling.__optional_keys__)}")
    bias = sampling.get("logit_bias")
    if isinstance(bias, Mapping):
        return {**sampling, "logit_bias": {str(token_id): number for token_id, number in bias.items()}}
    return dict(sampling)


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _listed(given: Iterable[Any]) -> list[Any]:
    """Prompts or conversations, where one may have been given alone."""
    listed = [given] if isinstance(given, str) else list(given)
    return [listed] if listed and isinstance(listed[0], int | Mapping) else listed
