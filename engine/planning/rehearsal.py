"""The engine's rehearsal: requests of its own that it serves before it is ready, so that the queue knows its steps.

They come one a step, so that prompts of several lengths are computed beside ever more streams, and end one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace
from itertools import cycle, islice

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.request_queue import UNLIMITED, Allowance, RequestQueue, StepLoad

MOST_S = 2.0
"""The rehearsal is cut off after the step that ends later than this."""
_PROMPTS = (16, 48, 8, 64, 24, 8, 32, 8, 8, 8)
_NUM_OUTPUT = 12
_ENOUGH_STEPS = 24
"""A queue is told of so many steps; if fewer were taken in time, of the same ones again."""
_STRIDE = 7_919
_NAME = "rehearsal"


class Rehearsal:
    """A queue of these requests, in place of the real one, which is told how long the steps took."""

    def __init__(self, queue: RequestQueue, vocab_size: int) -> None:
        self._queue = queue
        self._requests = deque(_requests(vocab_size))
        self._num_open = len(self._requests)
        self._may_take = False
        self._loads: list[StepLoad] = []

    @property
    def is_over(self) -> bool:
        return not self._num_open

    def end(self) -> Iterator[str]:
        """Starts no further request, and yields the ids of those that may run."""
        self._requests.clear()
        yield from (f"{_NAME}-{number}" for number in range(len(_PROMPTS)))

    def tell(self) -> None:
        """Tells the queue of enough steps, the last of which left the engine empty."""
        missing = max(1, _ENOUGH_STEPS - len(self._loads))
        for load in islice(cycle(self._loads), missing):
            empty = replace(load, num_running=0, num_free_tokens=load.num_kv_tokens, preempted=())
            self._queue.observe(empty)

    # The engine's side

    def allowance(self, *_: list[Sequence]) -> Allowance:
        self._may_take = True
        return UNLIMITED

    def take(self, fits: Callable[[Request], bool], above: int | None = None, *_: object) -> Request | None:
        if not self._may_take or not self._requests or above is not None or not fits(self._requests[0]):
            return None
        self._may_take = False
        return self._requests.popleft()

    def passed_over(self) -> Request | None:
        return None

    def charge(self, work: list[tuple[Request, int, int, int]], now: float) -> None: ...

    def observe(self, load: StepLoad) -> None:
        self._loads.append(load)
        self._queue.observe(load)

    def step_seconds(self, num_prefill: int, num_decode: int, num_context: int, num_attended: int) -> float:
        return self._queue.step_seconds(num_prefill, num_decode, num_context, num_attended)

    def settle(self, request: Request, now: float, sequence: Sequence | None = None) -> None:  # noqa: ARG002
        self._num_open -= 1

    def victim(self, running: list[Sequence], beneficiary: Sequence) -> Sequence | None:  # noqa: ARG002
        return running[-1] if running else None

    def giving_way(self, request: Request, running: list[Sequence]) -> list[Sequence]:  # noqa: ARG002
        return []


def _requests(vocab_size: int) -> Iterator[Request]:
    sampling = SamplingParams(max_tokens=_NUM_OUTPUT, ignore_eos=True)
    for number, num_prompt in enumerate(_PROMPTS):
        yield Request(
            request_id=f"{_NAME}-{number}",
            prompt_token_ids=_prompt(number, num_prompt, vocab_size),
            sampling=sampling,
        )


def _prompt(number: int, num_prompt: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens far apart, which choose different experts."""
    tokens: ListLike[int] = [_STRIDE * (100 * number + place) % vocab_size for place in range(num_prompt)]
    return tuple(tokens)
