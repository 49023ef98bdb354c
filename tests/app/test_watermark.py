"""`penstock watermark`, and a server that was given a key."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.app.build import build
from penstock.app.checkpoint import find_checkpoint
from penstock.app.cli import main
from penstock.app.settings import Settings
from penstock.app.watermark import MIN_PAIRS, read_watermark
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.text.watermark import evidence

SECRET = "a secret of more than sixteen bytes"
TOKENIZER = read_tokenizer(find_checkpoint(None))
WORDS = [
    token_id
    for token_id in range(TOKENIZER.vocab_size)
    if token_id not in TOKENIZER.special_ids
    and (text := TOKENIZER.decode([token_id])).strip().isalpha()
    and text.isascii()
]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    return path


def text_of(key: Path, num_tokens: int = 400) -> str:
    """A text of green tokens, as far as its spelling has the tokens that were chosen."""
    mark, numbers, token_ids = read_watermark(key), random.Random(1), [WORDS[0]]
    while len(token_ids) < num_tokens:
        token_id = numbers.choice(WORDS)
        if mark.is_green(token_ids[-1], token_id):
            token_ids.append(token_id)
    return TOKENIZER.decode(token_ids)


def detect(*arguments: object) -> int:
    return main(["watermark", "detect", *map(str, arguments), "--model", "penstock-demo"])


def test_a_text_with_the_watermark_is_known_by_its_key(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, figures = tmp_path / "text", tmp_path / "figures.json"
    text.write_text(text_of(key))
    assert detect(text, "--watermark-key-file", key, "--json", figures) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    found = json.loads(figures.read_text())
    expected = evidence(TOKENIZER.encode(text.read_text()), read_watermark(key))
    assert (found["tokens"], found["green"]) == (expected.num_scored, expected.num_green)
    assert found["z"] == pytest.approx(expected.z)
    assert float(shown["z"]) == pytest.approx(found["z"], abs=0.01)
    assert found["z"] > 5
    assert found["p"] < 1e-6
    other = tmp_path / "other"
    other.write_text(SECRET[::-1])
    assert detect(text, "--watermark-key-file", other, "--json", figures) == 0
    assert abs(json.loads(figures.read_text())["z"]) < 4


def test_standard_input(key: Path) -> None:
    """Without torch, which takes seconds to import."""
    code = (
        "import sys; from penstock.app.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    arguments = ["watermark", "detect", "-", "--model", "penstock-demo", "--watermark-key-file", str(key)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=text_of(key),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "z " in done.stdout


@pytest.mark.parametrize(
    ("text", "secret", "more", "said"),
    [
        (b"", SECRET, [], f"are 0, and a result needs {MIN_PAIRS}"),
        (b"a cat", SECRET, [], "too short"),
        (b"a cat " * 50, SECRET, [], "too short"),
        (b"\xff\xfe", SECRET, [], "not UTF-8"),
        (None, SECRET, [], "No such file"),
        (b"a cat", "short", [], "at least 16 bytes"),
        (b"a cat", None, [], "No such file"),
        (b"a cat", SECRET, ["--watermark-gamma", "1"], "less than 1"),
        (b"a cat", SECRET, ["--watermark-gamma", "0"], "greater than 0"),
        (b"a cat", SECRET, ["--json", "/no/such/folder"], "no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: bytes | None,
    secret: str | None,
    more: list[str],
    said: str,
) -> None:
    for name, content in (("text", text), ("key", None if secret is None else secret.encode())):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    assert detect(tmp_path / "text", "--watermark-key-file", tmp_path / "key", *more) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out
    assert secret is None or secret not in shown.err


def test_a_server_takes_its_settings_and_never_tells_the_key(
    key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    flags = {"watermark_key_file": str(key), "watermark_gamma": "0.25", "watermark_delta": "1.5"}
    options = build(Settings.load({**flags, "watermark_all": "true"})).service.options
    assert options.watermark == read_watermark(key, 0.25, 1.5)
    assert options.watermarks_all
    assert "all texts have a watermark, gamma 0.25, delta 1.5" in caplog.text
    assert not build(Settings.load(flags)).service.options.watermarks_all
    assert options.watermark is not None
    for secret in (SECRET, str(options.watermark.key), f"{options.watermark.key:x}"):
        assert secret not in caplog.text + repr(options)
    assert build(Settings.load({})).service.options.watermark is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watermark-all"], "watermark_all needs watermark_key_file"),
        (["--watermark-key-file", "/no/such/file"], "--watermark-key-file /no/such/file: No such file"),
        (["--watermark-gamma", "1"], "--watermark-gamma"),
        (["--watermark-delta", "0"], "--watermark-delta"),
    ],
)
def test_wrong_settings_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert said in capsys.readouterr().err
