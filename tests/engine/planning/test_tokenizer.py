from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.planning.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer().to_str())
METASPACE = Tokenizer(metaspace_tokenizer().to_str())


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_special_tokens_in_a_text_are_text_unless_asked_for() -> None:
    assert BYTE_LEVEL.id_of("<|end|>") not in BYTE_LEVEL.encode("say <|end|> now")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("say <|end|> now")) == "say <|end|> now"
    assert BYTE_LEVEL.id_of("<|end|>") in BYTE_LEVEL.encode("say <|end|> now", parse_special=True)


def test_kinds_are_told_apart() -> None:
    assert BYTE_LEVEL.is_byte_level
    assert not METASPACE.is_byte_level


@given(st.text())
def test_token_bytes_are_the_text_in_pieces(text: str) -> None:
    joined = b"".join(BYTE_LEVEL.token_bytes(i) for i in BYTE_LEVEL.encode(text))
    assert joined == text.encode()


def test_token_bytes_of_odd_tokens() -> None:
    fallback = METASPACE.id_of("<0xE2>")
    assert fallback is not None
    assert METASPACE.token_bytes(fallback) == b"\xe2"
    end = BYTE_LEVEL.id_of("<|end|>")
    assert end is not None
    assert BYTE_LEVEL.token_bytes(end) == b"<|end|>"
    assert BYTE_LEVEL.token_bytes(10_000_000) == b""


def write(folder: Path, config: object = None, template: str | None = None) -> Path:
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, {"chat_template": "old"}, "new")).chat_template == "new"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("x", "x"),
        (None, None),
        ([{"name": "default", "template": "d"}, {"name": "tool", "template": "t"}], "d"),
    ],
)
def test_templates_in_the_config(tmp_path: Path, template: object, found: str | None) -> None:
    assert Tokenizer.load(write(tmp_path, {"chat_template": template})).chat_template == found


def test_named_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    loaded = Tokenizer.load(write(tmp_path, config))
    assert loaded.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)
