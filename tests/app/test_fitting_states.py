"""What is said of models whose layers have a state before any of them is loaded: its bytes, and how many there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.app import fitting
from penstock.app.cli import main
from penstock.app.doctor import Check, Severity
from penstock.app.estimate import estimate
from penstock.engine.config import LoadOptions
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution import loader, memory
from penstock.engine.execution.memory import Budget
from penstock.engine.model.parse import read_config
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import NO_LIMIT
from penstock.engine.sizes import GIB
from tests.engine.families import STATES
from tests.engine.predictions import make_predicting, without_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = STATES["Qwen 3.5"].make(
        tmp_path_factory.mktemp("states"), linear_key_head_dim=128, linear_value_head_dim=128
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "check_compiler", lambda: Check(Severity.OK, "compiler", "c++"))


@pytest.mark.parametrize("kv_bytes", [1, 30 << 20, NO_LIMIT])
def test_no_more_sequences_run_than_there_are_states_for(folder: Path, kv_bytes: int) -> None:
    options = LoadOptions(device="cpu", kv_bytes=kv_bytes)
    sizes = estimate(read_config(folder), options, Budget(64 * GIB, 0.25))
    tables = SequenceMemory(sizes.plan.num_blocks, 16, num_states=sizes.plan.num_states)
    assert sizes.num_streams(1) == min(256, tables.max_running)
    assert (sizes.num_streams(1) == 256) == (kv_bytes == NO_LIMIT)


def test_doctor_says_what_a_state_takes_and_how_many_there_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(folder), "--device", "cpu", "--kv-memory", "30M"]) == 0
    said = capsys.readouterr().out
    found = re.search(
        r"A sequence has (\S+) MiB of states; (\S+) MiB hold (\d+) of them, for at most (\d+) ", said
    )
    assert found is not None, said
    state, states, held, running = map(float, found.groups())
    assert state == pytest.approx(states / (held + 1), abs=0.05)
    assert 10 < states < 20
    assert running == held - held // 4
    assert main(["doctor", str(folder), "--device", "cpu"]) == 0
    assert "is for KV and states" in capsys.readouterr().out


def test_states_for_which_there_is_no_room_are_refused_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 << 20)
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(
        NotEnoughMemory, match=r"not enough memory: .*, states \S+ MiB \(8 of \S+ MiB\), .*"
    ) as refused:
        loader.load_model(folder, LoadOptions(device="cpu"), lambda _: None, lambda *_: None)
    assert "\n" not in str(refused.value)
    assert main(["doctor", str(folder), "--device", "cpu"]) == 1
    assert re.search(r"does not fit.*\n.* states \S+ MiB for 6 sequences, and", capsys.readouterr().out)


def test_doctor_says_where_drafts_come_from_and_what_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_predicting("Qwen 3.5", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    asked = ["doctor", str(folder), "--device", "cpu"]
    line = "drafts  come from the model's own layer for multi-token prediction, "
    assert main(asked) == 0
    assert line in capsys.readouterr().out
    for without in (["--no-speculation"], ["--draft", "none"]):
        assert main([*asked, *without]) == 0
        assert "drafts  " not in capsys.readouterr().out
    options = LoadOptions(device="cpu", kv_bytes=1 << 20)
    model = loader.load_model(folder, options, lambda _: None, lambda *_: None)
    prediction = fitting.examine(str(folder), None, options).prediction
    sizes = estimate(read_config(folder), options, prediction=prediction)
    found = sizes.plan.draft, sizes.plan.block, sizes.plan.num_blocks
    assert found == (model.memory.draft, model.memory.block, model.memory.num_blocks)
    without_tensors(folder, "mtp.norm")
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert re.search("drafts  do not come from a layer of its own: .*tensor mtp.norm.weight is missing", said)
