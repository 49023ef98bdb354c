"""`penstock quantize`: what it writes, what it says, and that it leaves nothing half done."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.app import cli
from penstock.app import quantize as command
from penstock.app.errors import OperatorError
from penstock.engine.model import quantizing
from penstock.engine.model.parse import read_config
from penstock.engine.model.quantizing import Scheme
from tests.engine.checkpoints import make_checkpoint
from tests.engine.configs import with_attention, with_spec
from tests.engine.gguf_files import same, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "a server keeps its promises, and says so when it cannot; "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with all the files that a checkpoint can have."""
    folder = make_checkpoint(
        "llama",
        tmp_path_factory.mktemp("models") / "tiny",
        num_shards=2,
        intermediate_size=128,
        dtype="bfloat16",
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("free")
    (folder / "notes.txt").mkdir()
    (folder / "original.bin").write_bytes(b"weights of another format")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(WORDS * 400)
    return file


def quantize(*arguments: object) -> int:
    return cli.main(["quantize", *map(str, arguments)])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that says why."""
    assert quantize(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_it_makes_a_checkpoint(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(checkpoint, tmp_path / "made", "--calibration", text, "--group-size", 32) == 0
    out, _ = capsys.readouterr()
    scheme, memory, written, perplexity = out.splitlines()
    assert scheme == "gptq, 4 bits, groups of 32, symmetric; 1 of 3 layers in 8 bits, on cpu"
    assert re.fullmatch(
        r"calibration [\d,]+ tokens in \d+ pieces, held out [\d,]+ tokens in \d+ pieces; memory: activations "
        r"[\d,]+ MiB, a layer with its Hessians [\d,]+ MiB",
        memory,
    )
    sizes = [
        sum(path.stat().st_size for path in folder.glob("*.safetensors")) / (1 << 20)
        for folder in (tmp_path / "made", checkpoint)
    ]
    assert written == f"{tmp_path / 'made'}: {sizes[0]:,.1f} MiB of weights, before {sizes[1]:,.1f} MiB"
    found = re.fullmatch(
        r"perplexity of the held-out text: ([\d.]+) before, ([\d.]+) after, ([-+][\d.]+) %", perplexity
    )
    assert found is not None
    before, after, change = map(float, found.groups())
    assert change == pytest.approx(100 * (after / before - 1), abs=0.01)
    made, source = files(tmp_path / "made"), files(checkpoint)
    assert set(made) == {
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert all(
        made[name] == source[name] for name in made if name not in ("config.json", "model.safetensors")
    )
    config = json.loads(made["config.json"])
    quantization = config.pop("quantization_config")
    assert config == json.loads(source["config.json"])
    assert [group["weights"]["num_bits"] for group in quantization["config_groups"].values()] == [8, 4]
    with safe_open(tmp_path / "made" / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight_packed"} < names
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_other_methods(
    method: str, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    assert quantize(checkpoint, made, "--method", method, "--calibration", text, "--bits", 8) == 0
    assert capsys.readouterr().out.startswith(f"{method}, 8 bits, one scale a row, symmetric, on cpu")
    assert read_config(made).quantization is not None


def test_rounding_to_nearest_needs_no_text(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(checkpoint, tmp_path / "made", "--method", "rtn", "--asymmetric", "--wide-layers", 0) == 0
    out = capsys.readouterr().out
    assert out.startswith("rtn, 4 bits, groups of 64, asymmetric, on cpu")
    assert "perplexity: not measured without --calibration FILE" in out


def test_others_do(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--calibration FILE is missing" in refused(capsys, checkpoint, tmp_path / "made")
    assert not any(tmp_path.iterdir())


def test_a_gguf_file_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(checkpoint, tmp_path / "model.gguf", same("F16"))
    line = refused(capsys, path, tmp_path / "made", "--method", "rtn")
    assert f"{path} is a GGUF file: `penstock serve` takes it as it is" in line
    assert not (tmp_path / "made").exists()


def test_a_quantized_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(checkpoint, tmp_path / "made", "--method", "rtn") == 0
    capsys.readouterr()
    line = refused(capsys, tmp_path / "made", tmp_path / "again", "--method", "rtn")
    assert line.endswith("is quantized already, quant_method compressed-tensors")
    assert os.listdir(tmp_path) == ["made"]


def test_nothing_is_overwritten_unasked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made"
    out.mkdir()
    (out / "precious").write_text("mine")
    assert "--overwrite replaces it" in refused(capsys, checkpoint, out, "--method", "rtn")
    line = refused(capsys, checkpoint, out, "--method", "rtn", "--overwrite")
    assert "is no checkpoint" in line
    assert files(out) == {"precious": b"mine"}
    (out / "config.json").write_text("{}")
    assert quantize(checkpoint, out, "--method", "rtn", "--overwrite") == 0
    assert "precious" not in files(out)
    assert os.listdir(tmp_path) == ["made"]


def test_the_model_itself_is_not_replaced(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(checkpoint)
    line = refused(capsys, checkpoint, checkpoint, "--method", "rtn", "--overwrite")
    assert line.endswith("is MODEL itself")
    assert files(checkpoint) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--group-size", "48"], "--group-size must be 32, 64, 128 or row, and is 48"),
        (["--bits", "3"], "--bits"),
        (["--method", "magic"], "--method"),
        (["--method", "rtn", "--act-order"], "--act-order is for --method gptq"),
        (["--method", "rtn", "--wide-layers", "-1"], "--wide-layers must not be negative"),
        (["--method", "rtn", "--group-size", "128"], "groups of 128 do not divide the 64 inputs of"),
        (["--calibration", "nowhere.txt"], "--calibration nowhere.txt: No such file"),
        (["--calibration-tokens", "7"], "--calibration-tokens must be at least 1,024"),
        (["--quickly"], "unknown argument --quickly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    arguments: list[str], said: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, checkpoint, tmp_path / "made", *arguments)
    assert not any(tmp_path.iterdir())


def test_places_that_cannot_be(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no directory" in refused(capsys, checkpoint, tmp_path / "no" / "made", "--method", "rtn")
    assert f"MODEL {tmp_path}: " in refused(capsys, tmp_path, tmp_path / "made")
    (tmp_path / "file").write_text("mine")
    assert "no directory" in refused(capsys, checkpoint, tmp_path / "file", "--overwrite")


@pytest.mark.parametrize("fault", [OSError("the disk is full"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
def test_what_is_not_finished_is_removed(
    fault: BaseException,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(folder: Path, target: Path, *_: Any) -> None:  # noqa: ARG001
        target.write_bytes(b"the first half")
        raise fault

    monkeypatch.setattr(quantizing, "quantize", failing)
    status = quantize(checkpoint, tmp_path / "made", "--method", "rtn")
    expected = (
        (130, "interrupted; nothing was written") if isinstance(fault, KeyboardInterrupt) else (2, str(fault))
    )
    assert status == expected[0]
    assert expected[1] in capsys.readouterr().err.splitlines()[-1]
    assert not any(tmp_path.iterdir())


def test_a_signal_leaves_nothing(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """A real process, in the midst of its work."""
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock", "quantize", checkpoint, tmp_path / "made", "--method", "awq",
         "--calibration", text, "--group-size", "32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline().startswith("awq")
    assert running.stdout.readline().startswith("calibration")
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err.splitlines()[-1] == "penstock: interrupted; nothing was written"
    assert not any(tmp_path.iterdir())


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["MODEL", "OUT", *arguments])


@pytest.mark.parametrize(
    ("arguments", "scheme"),
    [
        ([], Scheme(method="gptq")),
        (["--act-order", "--wide-layers", "0"], Scheme(method="gptq", by_activation=True, num_wide_layers=0)),
        (["--method", "awq", "--asymmetric"], Scheme(method="awq", symmetric=False)),
        (["--bits", "8", "--asymmetric"], Scheme(method="gptq", bits=8, group_size=None)),
        (["--bits", "8", "--group-size", "32"], Scheme(method="gptq", bits=8, group_size=32)),
        (["--group-size", "row"], Scheme(method="gptq", group_size=None)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_scheme_is_what_is_asked_for(arguments: list[str], scheme: Scheme, checkpoint: Path) -> None:
    assert command._scheme(options(*arguments), read_config(checkpoint)) == scheme


@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "intermediate_size"])
def test_groups_are_smaller_where_they_must_be(name: str, checkpoint: Path) -> None:
    config = read_config(checkpoint)
    layer = config.layers[0]
    changed = {
        "hidden_size": with_attention(config, hidden_size=96),
        "head_dim": with_attention(config, head_dim=8),
        "intermediate_size": with_spec(config, layers=(layer.with_feed_forward(inner_size=96),)),
    }
    config = changed[name]
    assert command._scheme(options(), config).group_size == 32


def test_what_cannot_be_put_in_place_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(OperatorError, match=f"^OUT {out}: No such file or directory$"):
            command._put_in_place(tmp_path / "gone", out, overwrite)
        assert files(out) == {"config.json": b"{}"}


def test_overwrite_needs_nothing_to_replace(checkpoint: Path, tmp_path: Path) -> None:
    assert quantize(checkpoint, tmp_path / "made", "--method", "rtn", "--overwrite") == 0
    assert os.listdir(tmp_path) == ["made"]


def test_a_half_of_another_is_left_alone(tmp_path: Path) -> None:
    half = tmp_path / f".made.{os.getpid()}.partial"
    half.touch()
    with pytest.raises(OperatorError, match=r"made: File exists$"), command._beside(tmp_path / "made"):
        pass


def test_a_termination_is_an_interrupt_while_it_works() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), command._terminations_as_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
