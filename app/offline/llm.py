"""`LLM`: a model in a program.

The engine has a thread of its own, so a call blocks nobody but its caller, and works beside an event loop that runs
already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Self

from typing_extensions import Unpack

from penstock.app.build import build_core
from penstock.app.errors import OperatorError, describe_failure
from penstock.app.kernels import check_level
from penstock.app.log import counter, progress_bar, silent
from penstock.app.offline.answers import Answer, Choice, Piece, named, piece_of
from penstock.app.offline.calls import CallOutputs, Deliveries
from penstock.app.offline.requests import Conversation, Prompt, Requests, Sampling
from penstock.app.offline.settings import offline_settings
from penstock.engine.engine import EngineState
from penstock.engine.planning.request import Output, Request
from penstock.engine.tiers.tiers import TiersUse
from penstock.gateway.wire.embeddings import shortened

_STOP_S = 5.0
"""A step that hangs must not keep the program."""


def _nobody() -> None:
    pass


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
        deliveries = self._deliveries = Deliveries()
        show = progress_bar if progress else silent
        try:
            check_level()
            core = build_core(
                offline_settings(model, settings), deliveries.deliver, deliveries.announce, show=show
            )
            self._requests = Requests(core)
        except OperatorError as error:
            raise ValueError(str(error)) from None
        self._core, self._engine, self._queue = core, core.engine, core.queue
        core.engine.start()
        # Also when it is forgotten, and at the program's end: a thread inside torch does not survive the interpreter.
        self._stop = weakref.finalize(self, core.engine.stop, _STOP_S)
        deliveries.settled.wait()
        if core.engine.failure is not None:
            raise RuntimeError(describe_failure(core.engine.failure, core.model.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tiers_use(self) -> TiersUse:
        """The use of `kv_host_bytes` and `kv_disk`."""
        return self._engine.stats().tiers

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
        return self._answers(self._requests.of_prompts(prompts, sampling), progress)

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
        requests = self._requests.of_conversations(conversations, sampling)
        return self._answers(requests, progress)

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, progress: bool | None = None
    ) -> list[list[float]]:
        """The embeddings of texts, or of token ids, made as the checkpoint's own files say.

        Args:
            dimensions: numbers of each; None is all of them.
        """
        embedding = self._core.model.embedding
        if dimensions is not None and not 1 <= dimensions <= (embedding.size or dimensions):
            raise ValueError(f"'dimensions' must be 1 to {embedding.size} for this model.")
        requests = self._requests.of_texts(texts)
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
        """Answers piece by piece as they come, for prompts or for conversations. Arguments are checked at once."""
        return Stream(self, self._requests.of_either(prompts, sampling))

    def _answers(self, requests: list[Request], progress: bool | None) -> list[Answer]:
        answers = [Answer(r.prompt_token_ids, [Choice() for _ in range(r.n)]) for r in requests]
        choices_left = [request.n for request in requests]
        num_done = 0
        with self._asked(requests) as call, self._shown(progress)("generating", len(requests)) as update:
            for number, output in call:
                answer = answers[number]
                answer.choices[output.index].add(self._piece(number, output))
                if (found := output.prompt_logprobs) is not None:
                    prompt = answer.prompt_token_ids[1:]
                    answer.prompt_logprobs = named(prompt, found, self._core.model.tokenizer)
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
        return piece_of(number, output, self._core.model.tokenizer)

    @contextlib.contextmanager
    def _asked(
        self, requests: Iterable[Request], tell: Callable[[], None] = _nobody
    ) -> Iterator[CallOutputs]:
        """Asks the engine; whatever has not ended at the end of the block is cancelled there."""
        now = time.monotonic()
        asked = [replace(request, request_id=next(self._ids), arrival_s=now) for request in requests]
        call = CallOutputs(asked, tell)
        self._deliveries.calls.update(dict.fromkeys(call.open, call))
        try:
            if self._engine.state is not EngineState.READY:
                raise RuntimeError(self._engine.error or "this LLM is closed")
            for request in asked:
                self._queue.readmit(request, now)  # nothing is refused here, nor expires
            self._engine.expect(asked)
            self._engine.wake()
            yield call
        finally:
            for request in asked:
                del self._deliveries.calls[request.request_id]
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
