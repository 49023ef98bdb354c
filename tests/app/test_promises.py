"""What a machine promises is said in its own terms, and remembered for the doctor."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.app import doctor
from penstock.app.promises import promises, remember, remembered
from penstock.app.settings import Settings
from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue
from penstock.priority.steptime import StepTimeModel
from tests.engine.checkpoints import make_checkpoint
from tests.priority.simulated_engine import known_model
from tests.priority.test_admission import IDLE


def queue_of(model: StepTimeModel) -> LaneQueue:
    queue = LaneQueue(threading.Lock(), model=model)
    queue.observe(IDLE)
    return queue


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_nothing_is_said_before_anything_is_known() -> None:
    assert list(promises(LaneQueue(threading.Lock()).admission, 8_192)) == []


def test_a_prompt_is_promised_its_lane_time_as_far_as_the_machine_keeps_it() -> None:
    admission = queue_of(known_model(factor=20)).admission
    interactive, standard = promises(admission, 8_192)
    start = "interactive: first token within 1 s for prompts of up to "
    assert interactive.startswith(start)
    longest = int(interactive.removeprefix(start).partition(" ")[0].replace(",", ""))
    assert admission.promised_s(Lane.INTERACTIVE, longest) == 1.0
    assert (admission.promised_s(Lane.INTERACTIVE, longest + 1) or 0) > 1.0
    assert interactive.endswith(f", within {admission.promised_s(Lane.INTERACTIVE, 4_000):.1f} s for 4,000")
    assert standard == "standard: first token within 30 s for prompts of up to 8,191 tokens"


def test_a_short_context_is_the_example() -> None:
    assert next(iter(promises(queue_of(known_model(factor=2_000)).admission, 512))).endswith(" s for 511")


def test_the_doctor_says_what_was_promised_last(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    settings = Settings(model=str(folder))
    [unknown] = doctor.check_promises(settings)
    assert unknown.text == "measured when the model is first served here"
    remember(folder, settings, ["interactive: soon", "standard: later"])
    remember(tmp_path, settings, ["interactive: another model's"])
    told = [check.text.partition(" (measured on ")[0] for check in doctor.check_promises(settings)]
    assert told == ["interactive: soon", "standard: later"]
    assert remembered(folder, Settings(model=str(folder), quantize="int8")) == []


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_memory_is_none(tmp_path: Path, content: str) -> None:
    remember(tmp_path, Settings(), ["x"])
    [place] = (tmp_path / "cache" / "penstock").iterdir()
    place.write_text(content, encoding="utf-8")
    assert remembered(tmp_path, Settings()) == []
    remember(tmp_path, Settings(), ["y"])
    assert remembered(tmp_path, Settings())[0].startswith("y")


def test_a_cache_that_cannot_be_written_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    remember(tmp_path, Settings(), ["x"])
    assert remembered(tmp_path, Settings()) == []
