"""The ladder's rules: who keeps the promise, how many do, what it costs, and that all rungs get the same load."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from penstock.app.bench import command
from penstock.app.bench.ladder import (
    OWN_TOKENS,
    SHARED_TOKENS,
    USERS,
    Ladder,
    cost_per_million,
    is_kept,
    most_users,
    print_ladder,
)
from penstock.app.bench.ladder_plot import draw_ladder
from penstock.app.bench.server_process import ServerProcess
from penstock.app.errors import OperatorError
from penstock.app.reader import Answer

ENDS = {"failed": 0, "requests": 64, "first_error": None}
ROWS = [
    {
        "rung": "generate",
        "tokens_per_s": 10.0,
        "ttft_p50_ms": 9_000.0,
        "ttft_p99_ms": 18_000.0,
        "users": 0,
        **ENDS,
    },
    {
        "rung": "batching",
        "tokens_per_s": 300.0,
        "ttft_p50_ms": 500.0,
        "ttft_p99_ms": 900.0,
        "users": 64,
        **ENDS,
    },
]


def answer(*token_times_s: float, error: str | None = None) -> Answer:
    return Answer(0.0, 9.0, list(token_times_s), num_output_tokens=11, error=error)


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
def test_a_promise_is_both_times_and_a_whole_answer(found: Answer, kept: bool) -> None:
    assert is_kept(found) is kept


@pytest.mark.parametrize(
    ("limit", "most"), [(0, 0), (1, 1), (2, 2), (3, 3), (11, 8), (12, 12), (63, 48), (10_000, 256)]
)
def test_the_most_users_are_found_to_a_quarter(limit: int, most: int) -> None:
    assert most_users(lambda users: 1.0 if users <= limit else 0.9) == most


def test_19_of_20_are_enough() -> None:
    assert most_users(lambda users: 0.95 if users <= 4 else 0.94) == 4


def test_a_machine_of_a_dollar_that_makes_a_thousand_tokens_a_second() -> None:
    assert cost_per_million(1.0, 1_000.0) == pytest.approx(0.2778, abs=1e-4)


def ladder(jobs: list[object]) -> Ladder:
    def start(arguments: object) -> AbstractContextManager[ServerProcess]:
        raise AssertionError(arguments)

    def run_module(name: str, job: object) -> object:
        jobs.append((name, job))
        return [0.4, 0.4, 0.4]

    return Ladder(start, run_module, None, range(100, 200), "model", "int8", [], 2)


def test_one_by_one_users_wait_for_those_before_them() -> None:
    row = next(ladder([]).measure())
    assert row["tokens_per_s"] == pytest.approx(64 / 0.4)
    assert row["ttft_p50_ms"] == pytest.approx(1_000 * 0.4 * (USERS + 1) / 2)
    assert row["users"] == 2


def test_prompts_are_of_one_length_and_share_a_beginning_only_if_asked() -> None:
    some = ladder([])
    shared, apart = some._prompts(3, 1, shared=True), some._prompts(3, 1, shared=False)
    assert {len(prompt) for prompt in shared + apart} == {SHARED_TOKENS + OWN_TOKENS}
    assert len({tuple(prompt[:SHARED_TOKENS]) for prompt in shared}) == 1
    assert len({tuple(prompt[SHARED_TOKENS:]) for prompt in shared}) == 3
    assert len({tuple(prompt[:16]) for prompt in apart}) == 3


def test_a_rung_that_failed_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    row = {**ROWS[1], "tokens_per_s": 0.0, "failed": 64, "first_error": "no answer"}
    print_ladder("demo", [ROWS[0], row], 1.0)
    assert "batching: 64 of 64 requests failed: no answer" in capsys.readouterr().out


def test_rungs_are_times_the_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_ladder("demo", ROWS, 2.0)
    assert capsys.readouterr().out.splitlines()[4].split() == [
        "batching",
        "300",
        "30x",
        "500",
        "900",
        "64",
        "1.85",
    ]
    draw_ladder(tmp_path / "ladder.png", {"demo": ROWS, "135m": ROWS})
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ladder", "--workload", "W1"],
        ["--plot", "/tmp/x.png", "--only", "http"],
        ["--cost", "/tmp/x.json", "--ladder"],
    ],
)
def test_runs_that_do_not_go_together(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(OperatorError):
        command.run(parser.parse_args(arguments))
