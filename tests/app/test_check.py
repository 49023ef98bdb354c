"""`penstock check` finds the demo model as its weights are, and says what it leaves out and why."""

from __future__ import annotations

import json
import re
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.app.check import theirs
from penstock.app.check.compare import Distance, compare, divergence, total
from penstock.app.check.ours import Predictions
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.cli import main
from tests.engine.checkpoints import make_checkpoint
from tests.engine.families import TINY
from tests.engine.gguf_files import same, write_family, write_gguf


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """The status of the command, and its lines from the table on."""
    status = main(["check", *arguments, "--device", "cpu", "--num-blocks", "1024"])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    lines = said.out.splitlines()
    return status, lines[lines.index("") + 1 :]


def test_the_demo_model_says_what_its_weights_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = checked(capsys, "penstock-demo", "--json", str(tmp_path / "figures.json"))
    assert lines[-1] == "it says what its weights say"
    assert status == 0
    assert lines[0].split() == ["penstock-demo"]
    assert [line[:23].strip() for line in lines[2:6]] == [
        "loading", "a prompt of 512 tokens", "one stream", "KL to float32",
    ]  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["speed"].keys() == {"loading_s", "prompt_length", "prompt", "stream"}
    assert all(figure > 0 for figure in figures["speed"].values())
    every = total(Distance(**row) for row in figures["texts"].values())
    assert every.mean_kl < 1e-4
    assert every.agreement > 0.99
    assert every.greedy > 0.95 * every.chosen
    assert f"{every.agreeing:,} of {every.places:,}" in lines[-4]


def test_rounding_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    assert checked(capsys, "--quantize", "int4", "--json", str(output))[0] == 0
    every = total(Distance(**row) for row in json.loads(output.read_text())["texts"].values())
    assert 1e-3 < every.mean_kl < 1


def test_a_gguf_file_is_compared_with_what_transformers_reads_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(DEMO_MODEL, tmp_path / "demo.gguf", same("Q8_0"), pre="smollm")
    status, lines = checked(capsys, str(path))
    assert lines[-1] == "it says what its weights say"
    assert status == 0


def test_other_weights_are_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = theirs.load

    def upside_down(folder: Path) -> Any:
        network = real(folder)
        network.lm_head.weight.data.neg_()
        return network

    monkeypatch.setattr(theirs, "load", upside_down)
    status, lines = checked(capsys)
    assert re.fullmatch(r"wrong: of the likeliest tokens only \d% are those of its weights", lines[-1])
    assert status == 1


def test_what_is_too_large_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(theirs, "available_bytes", lambda: 5 << 20)
    status, lines = checked(capsys)
    assert status == 0
    assert lines[5].split() == ["KL", "to", "float32", "not", "compared"]
    said = r"not compared: transformers would take \d+\.\d MiB in float32, and 5\.0 MiB are free"
    assert re.fullmatch(said, lines[-1])


def test_without_transformers_it_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, lines = checked(capsys)
    assert status == 0
    assert lines[-1].startswith("not compared: pip install 'penstock[compare]' brings transformers")


def test_what_transformers_does_not_read_is_left_out(tmp_path: Path) -> None:
    path = write_family(TINY["EXAONE 4"].make(tmp_path), tmp_path / "model.gguf")
    with pytest.raises(theirs.LeftOut, match=r"^transformers cannot load it: .*exaone4"):
        theirs.load(path)


def test_weights_that_transformers_makes_up_are_not_compared(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(theirs.LeftOut, match=r"^transformers finds no model\.norm\.weight in it$"):
        theirs.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/model"], "--model /nowhere/model: there is no directory /nowhere/model"),
        (["a", "--model", "b"], "give a or --model, not both"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no such folder"),
        (["--max-model-len", "64", "--device", "cpu"], "maximum context length is 64 tokens"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("penstock: ")
    assert said in last


def test_the_divergence_counts_what_is_not_among_the_likeliest() -> None:
    exact = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert divergence(exact, [(0, log(0.5)), (1, log(0.3))]) == pytest.approx(0, abs=1e-6)
    expected = 0.5 * log(0.5 / 0.4) + 0.3 * log(0.3 / 0.3) + 0.2 * log(0.2 / 0.3)
    assert divergence(exact, [(0, log(0.4)), (1, log(0.3))]) == pytest.approx(expected, rel=1e-5)


def test_greedy_tokens_count_up_to_the_first_that_is_less_likely() -> None:
    exact = torch.tensor([[0.6, 0.4], [0.499, 0.501], [0.2, 0.8], [0.9, 0.1]]).log()
    told = Predictions("prose", (1,), [[(0, log(0.6)), (1, log(0.4))]], greedy=[0, 0, 0, 0])
    found = compare(told, exact)
    assert found == Distance(found.kl, agreeing=1, places=1, greedy=2, chosen=4)
    assert found.kl == pytest.approx(0, abs=1e-6)
