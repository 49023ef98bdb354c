"""The ladder's rules: who keeps the promise, how many do, what it costs, and that all rungs get the same load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from penstock.app.bench.ladder import (
    OWN_TOKENS,
    SHARED_TOKENS,
    Ladder,
    is_kept,
    most_users,
)
from penstock.app.bench.server_process import ServerProcess
from penstock.app.reader import TimedAnswer


def answer(*token_times_s: float, error: str | None = None) -> TimedAnswer:
    return TimedAnswer(0.0, 9.0, list(token_times_s), num_output_tokens=11, error=error)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (answer(0.9, 1.8), True),
        (answer(1.0, 2.0), True),
        (answer(1.1, 1.2), False),
        (answer(0.9, 2.0), False),
        (answer(), False),
        (answer(0.9, 1.8, error="cut"), False),
    ],
    ids=["kept", "just", "late", "slow", "nothing", "cut"],
)
def test_a_promise_is_both_times_and_a_whole_answer(found: TimedAnswer, kept: bool) -> None:
    assert is_kept(found) is kept


@pytest.mark.parametrize(
    ("limit", "most"), [(0, 0), (1, 1), (2, 2), (3, 3), (11, 8), (12, 12), (63, 48), (10_000, 256)]
)
def test_the_most_users_are_found_to_a_quarter(limit: int, most: int) -> None:
    assert most_users(lambda users: 1.0 if users <= limit else 0.9) == most


def ladder(jobs: list[object]) -> Ladder:
    def start(arguments: object) -> AbstractContextManager[ServerProcess]:
        raise AssertionError(arguments)

    def run_module(name: str, job: object) -> object:
        jobs.append((name, job))
        return [0.4, 0.4, 0.4]

    return Ladder(start, run_module, None, range(100, 200), "model", "int8", [], 2)


@pytest.mark.parametrize("encode", [None, lambda text: list(text.encode())])
def test_prompts_are_of_one_length_and_share_a_beginning_only_if_asked(
    encode: Callable[[str], list[int]] | None,
) -> None:
    some = replace(ladder([]), encode=encode)
    shared, apart = some._prompts(3, 1, shared=True), some._prompts(3, 1, shared=False)
    assert {len(prompt) for prompt in shared + apart} == {SHARED_TOKENS + OWN_TOKENS}
    assert len({tuple(prompt[:SHARED_TOKENS]) for prompt in shared}) == 1
    assert len({tuple(prompt[SHARED_TOKENS:]) for prompt in shared}) == 3
    assert len({tuple(prompt[:99]) for prompt in apart}) == 3
