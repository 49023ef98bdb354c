"""`penstock quantize`: what it writes, what it says, and that it leaves nothing half done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from app import cli
from app.calibration import make_texts
from app.errors import OperatorError
from engine.model import quantizing
from engine.model.config import ModelConfig
from engine.model.parse import read_config
from engine.planning.tokenizer import Tokenizer
from tests.engine.checkpoints import make_checkpoint
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
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_makes_a_checkpoint(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(checkpoint, tmp_path / "made", "--calibration", text, "--group-size", 32) == 0
    out, _ = capsys.readouterr()
    plan, memory, written, perplexity = out.splitlines()
    assert plan == "gptq, 4 bits, groups of 32, symmetric; 1 of 3 layers in 8 bits, on cpu"
    assert memory.startswith("calibration ")
    assert "MiB" in memory
    assert written.startswith(f"{tmp_path / 'made'}: ")
    assert perplexity.startswith("perplexity of the held-out text: ")
    made, before = files(tmp_path / "made"), files(checkpoint)
    assert set(made) == {
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert all(
        made[name] == before[name] for name in made if name not in ("config.json", "model.safetensors")
    )
    config = json.loads(made["config.json"])
    quantization = config.pop("quantization_config")
    assert config == json.loads(before["config.json"])
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


class TestTexts:
    def texts(self, checkpoint: Path, file: Path, tokens: int = 4096, **config: Any) -> Any:
        return make_texts(checkpoint, self.config(checkpoint, **config), file, tokens, is_needed=True)

    def config(self, checkpoint: Path, **changes: Any) -> ModelConfig:
        from dataclasses import replace

        return replace(read_config(checkpoint), **changes)

    def test_a_piece_in_five_is_held_out(self, checkpoint: Path, text: Path) -> None:
        found = self.texts(checkpoint, text, max_position=100)
        bos = read_config(checkpoint).bos_token_id
        pieces = [*found.calibration, *found.held_out]
        assert all(piece.token_ids[0] == bos for piece in pieces)
        assert max(len(piece.token_ids) for piece in pieces) == 100
        assert 3900 < sum(len(piece.token_ids) for piece in found.calibration) <= 4096
        assert len(found.held_out) == pytest.approx(len(pieces) / 5, abs=1)

    def test_the_pieces_are_the_text(self, checkpoint: Path, text: Path) -> None:
        found = self.texts(checkpoint, text, 100_000)
        pieces = [*found.calibration]
        for number, piece in enumerate(found.held_out):
            pieces.insert(1 + 5 * number, piece)
        tokenizer = Tokenizer.load(checkpoint)
        ids = [token for piece in pieces for token in piece.token_ids[1:]]
        assert tokenizer.decode(ids) == text.read_text()

    def test_json_lines(self, checkpoint: Path, tmp_path: Path) -> None:
        file = tmp_path / "texts.jsonl"
        file.write_text("\n".join(json.dumps({"text": f"{i} {WORDS}", "id": i}) for i in range(200)) + "\n\n")
        found = self.texts(checkpoint, file)
        tokenizer = Tokenizer.load(checkpoint)
        assert tokenizer.decode(found.calibration[0].token_ids[1:]) == f"0 {WORDS}"
        assert tokenizer.decode(found.held_out[0].token_ids[1:]) == f"1 {WORDS}"
        assert tokenizer.decode(found.calibration[1].token_ids[1:]) == f"2 {WORDS}"

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.jsonl", b'{"text": "a"}\nno', 'line 2: this is no JSON object with "text"'),
            ("a.jsonl", b"[1]", 'line 1: this is no JSON object with "text"'),
            ("a.jsonl", b'{"text": 3}', 'line 1: "text" is no string'),
            ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
            ("a.txt", b"short", "tokens are too few, at least 1,024 are needed"),
            ("a.txt", b"", "0 tokens are too few"),
        ],
    )
    def test_broken_files(
        self, name: str, content: bytes, said: str, checkpoint: Path, tmp_path: Path
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OperatorError) as caught:
            self.texts(checkpoint, tmp_path / name)
        assert said in str(caught.value)
