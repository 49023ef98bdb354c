"""What drafts cost and bring, of steps that take a known time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench.stepping import Always, Step
from loadtests.gpu import drafts, figures, sizes
from loadtests.gpu.checkpoints import token_ids
from loadtests.gpu.drafts import Forced, ForcedModel
from loadtests.gpu.parts import Outcome
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.request import Request, SamplingParams
from penstock.engine.planning.step import OPEN, Chunk, Plan

RIGHT = token_ids()[0]


class FakeStepper:
    """A step takes 10 ms, and 2 ms for each draft of a stream; steps of all streams follow one of some of them."""

    made: FakeStepper
    num_steps = 8

    def __init__(self, load: Callable[[], object], num_ahead: int) -> None:
        self.num_ahead, self.load = num_ahead, load
        self.facts = SimpleNamespace(has_draft_model=True)
        self.runs: list[tuple[list[Request], Always | None]] = []
        FakeStepper.made = self
        load()

    def run(self, requests: list[Request], drafting: Always | None) -> list[Step]:
        self.runs.append((requests, drafting))
        most = 0 if drafting is None else drafting.most
        whole = [step(len(requests), most, 0.01 + 0.002 * most) for _ in range(self.num_steps)]
        late = [step(len(requests), most, 5.0)] * 4
        prefill = step(len(requests), most, 7.0, samples=False)
        return [
            step(len(requests) + 1, most, 9.0),
            prefill,
            step(len(requests), most, 8.0, 32),
            *late,
            *whole,
        ]


def step(streams: int, num_drafts: int, seconds: float, num_tokens: int = 1, *, samples: bool = True) -> Step:
    """A step that brings one token and, of its drafts, the first to every stream."""
    chunk: Any = SimpleNamespace(
        samples=samples, num_tokens=num_tokens + num_drafts, drafts=[RIGHT] * num_drafts
    )
    return Step(Plan(chunks=[chunk] * streams), streams * (2 if num_drafts else 1), seconds)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, Path, int]]:
    """The checkpoints that are written."""
    found: list[tuple[object, Path, int]] = []

    def write(shape: object, folder: Path, num_random: int) -> None:
        folder.mkdir()
        found.append((shape, folder, num_random))

    monkeypatch.setattr(drafts, "Stepper", FakeStepper)
    monkeypatch.setattr(drafts, "write_checkpoint", write)
    monkeypatch.setattr(drafts, "load_model", lambda *arguments: loaded.append(arguments))
    loaded.clear()
    return found


loaded: list[Sequence[Any]] = []


def run(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Outcome]:
    outcome = Outcome("drafts")
    monkeypatch.setattr(drafts, "parse_arguments", lambda: sizes.Arguments(mode, folder, ()))
    monkeypatch.setattr(figures, "_tell", lambda said: outcome.take(json.dumps(said)))
    return drafts.main(), outcome


@pytest.mark.parametrize(
    ("mode", "device", "num_random"), [("full", "cuda", 1 << 26), ("dry", "cpu", 1 << 20)]
)
def test_each_number_of_streams_is_measured_without_drafts_and_with_two_kinds(
    mode: str,
    device: str,
    num_random: int,
    written: list[tuple[object, Path, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, outcome = run(mode, tmp_path, monkeypatch)
    assert (status, outcome.skipped) == (0, [])
    target, draft, expected = sizes.speculation(mode)
    folders = [tmp_path / "drafted-for", tmp_path / "draft"]
    assert written == [(target, folders[0], num_random), (draft, folders[1], num_random)]
    ((model, options, _, _, source),) = loaded
    assert (model, source, options.device, options.max_batch_tokens) == (
        folders[0], DraftSource(folders[1]), device, 0,
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == [], "checkpoints are gone"
    assert [(figure.name, round(figure.value, 9), figure.unit, figure.how) for figure in outcome.figures] == [
        (f"llama-8b: TPOT, batch {streams}, {what}", value, "ms", how)
        for streams in expected.streams
        for what, value, how in (
            ("no drafts", 10, "1.00 tokens a step of 10.00 ms"),
            ("4 drafts, 80% right", 9, "2.00 tokens a step of 18.00 ms"),
            ("4 drafts of a draft model, 80% right", 9, "2.00 tokens a step of 18.00 ms"),
        )
    ]
    assert FakeStepper.made.num_ahead == 1
    draftings = [drafting for _, drafting in FakeStepper.made.runs]
    assert [type(drafting) for drafting in draftings] == [type(None), Always, ForcedModel] * len(
        expected.streams
    )
    for drafting in filter(None, draftings):
        forced = drafting.forced if isinstance(drafting, ForcedModel) else drafting.proposer
        assert isinstance(forced, Forced)
        assert (forced._right, forced._rightness) == (RIGHT, 0.8)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=expected.num_tokens, ignore_eos=True, logit_bias={RIGHT: 1000.0}
    )
    for requests, _ in FakeStepper.made.runs:
        assert len({request.request_id for request in requests}) == len(requests)
        for request in requests:
            assert request.sampling == sampling
            assert len(request.prompt_token_ids) == 32
            assert all(token in token_ids() for token in request.prompt_token_ids)
    said = capsys.readouterr().err
    assert "drafts: writing the checkpoints\n" in said
    assert "drafts: loading\n" in said
    assert said.count(" streams, no drafts\n") == len(expected.streams)


@pytest.mark.usefixtures("written")
def test_without_steps_of_all_streams_there_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStepper, "num_steps", 0)
    status, outcome = run("dry", tmp_path, monkeypatch)
    assert (status, outcome.figures) == (0, [])
    assert len(outcome.skipped) == 6
    assert outcome.skipped[0] == ("llama-8b: TPOT, batch 1, no drafts", "no steps of all streams")


@pytest.mark.usefixtures("written")
def test_what_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeStepper, "run", None)
    status, outcome = run("dry", tmp_path, monkeypatch)
    assert status == 1
    assert outcome.skipped == [("the rest of drafts", "TypeError: 'NoneType' object is not callable")]
    assert "Traceback" in capsys.readouterr().err


def test_drafts_are_right_as_often_as_is_wanted() -> None:
    forced = Forced(7, 0.8)
    first, second = forced.propose([], [1000, 3])
    assert (set(first), len(first), len(second)) == ({7, 8}, 1000, 3)
    assert first.count(7) == pytest.approx(800, abs=50)
    assert Forced(7, 0.8).propose([], [1000])[0] == first, "the same drafts in every run"
    assert set(Forced(7, 0.0).propose([], [100])[0]) == {8}


def test_as_many_are_forced_as_the_draft_model_made() -> None:
    sequences: list[Any] = [SimpleNamespace(num_computed=9, num_preemptions=0) for _ in range(2)]
    chunks = [Chunk(sequence, 4, 5, samples=True, drafts=[OPEN] * 4) for sequence in sequences]
    plan = Plan(chunks, num_tokens=10)
    ForcedModel(Forced(7, 1.0), 4).fill(plan, [[1, 2, 3, 4], [5]], 0.0)
    assert [chunk.drafts for chunk in plan.chunks] == [[7] * 4, [7]]
    assert plan.num_tokens == 7
