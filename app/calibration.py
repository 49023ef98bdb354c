"""The texts that `penstock quantize` shows to a model: some to calibrate it with, some held out to measure it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.errors import OperatorError
from penstock.engine.config import ModelConfig
from penstock.engine.model.texts import Text, Texts
from penstock.engine.text.tokenizer import Tokenizer

PIECE_TOKENS = 512
"""The most tokens of a piece; longer texts are cut."""

_HELD_OUT_EVERY = 5
"""One piece in this many is held out."""

_FEWEST_TOKENS = 1024
_MOST_CHARACTERS_PER_TOKEN = 32
"""No more of a file is read than so many bytes for each token that is wanted."""

_DEMO_TEXTS = DEMO_MODEL.parent / "texts.json"
"""Conversations as token ids of the demo model's tokenizer, made by `python -m demo.texts`."""


def make_texts(
    folder: Path, config: ModelConfig, file: Path | None, num_tokens: int, *, is_needed: bool
) -> Texts:
    """The texts of a file, or the demo model's own. Neither is needed where nothing is calibrated.

    Args:
        num_tokens: the most to calibrate with; a quarter as many are held out.

    Raises:
        OperatorError: there are none, or too few.
    """
    if num_tokens < _FEWEST_TOKENS:
        raise OperatorError(
            f"--calibration-tokens must be at least {_FEWEST_TOKENS:,}, and is {num_tokens:,}"
        )
    if file is not None:
        return _split(_pieces_of(file, folder, config, num_tokens), num_tokens, file)
    if folder.resolve() == DEMO_MODEL.resolve():
        return _demo_texts(num_tokens)
    if is_needed:
        raise OperatorError(
            '--calibration FILE is missing: text like that the model will see, plain or JSON lines with "text"'
        )
    return Texts()


def _demo_texts(num_tokens: int) -> Texts:
    """Returns the demo model's own conversations with `num_tokens` in all, and a quarter as many held out."""
    texts = json.loads(_DEMO_TEXTS.read_text(encoding="utf-8"))
    held_out = _first(texts["held_out"], num_tokens // (_HELD_OUT_EVERY - 1))
    return Texts(_first(texts["calibration"], num_tokens), held_out)


def _first(pieces: list[dict[str, Any]], num_tokens: int) -> list[Text]:
    """The pieces before the one with which they would be more than `num_tokens`."""
    totals = accumulate(len(piece["token_ids"]) for piece in pieces)
    return [
        Text(piece["token_ids"], [mark == "1" for mark in piece["counted"]])
        for piece, total in zip(pieces, totals, strict=True)
        if total <= num_tokens
    ]


def _pieces_of(file: Path, folder: Path, config: ModelConfig, num_tokens: int) -> Iterator[Text]:
    """Pieces of the texts of a file; each starts with the token that the tokenizer starts a text with."""
    tokenizer = Tokenizer.load(folder)
    start = tokenizer.encode("", add_special=True)[:1]
    start = start if start == [config.bos_token_id] else []
    length = min(PIECE_TOKENS, config.max_position) - len(start)
    for text in _texts_of(file, num_tokens * _MOST_CHARACTERS_PER_TOKEN):
        ids = tokenizer.encode(text)
        for first in range(0, len(ids), length):
            piece = [*start, *ids[first : first + length]]
            if len(piece) > 1:
                yield Text(piece)


def _split(pieces: Iterator[Text], num_tokens: int, file: Path) -> Texts:
    """Holds one piece in five out.

    Raises:
        OperatorError: there are too few tokens.
    """
    calibration: list[Text] = []
    held_out: list[Text] = []
    count = 0
    for number, piece in enumerate(pieces):
        if number % _HELD_OUT_EVERY == 1:
            held_out.append(piece)
            continue
        if count + len(piece.token_ids) > num_tokens:
            break
        calibration.append(piece)
        count += len(piece.token_ids)
    if count < _FEWEST_TOKENS or not held_out:
        raise OperatorError(
            f"--calibration {file}: {count:,} tokens are too few, at least {_FEWEST_TOKENS:,} are needed"
        )
    return Texts(calibration, held_out)


def _texts_of(file: Path, most_characters: int) -> Iterator[str]:
    """The texts of JSON lines, or a whole file of plain text; no more of it than so many characters.

    Raises:
        OperatorError: the file cannot be read, or a line is no object with a text.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            if file.suffix not in (".jsonl", ".json", ".ndjson"):
                yield opened.read(most_characters)
                return
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield _text_of(line, f"--calibration {file}, line {number}")
    except OSError as error:
        raise OperatorError(f"--calibration {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OperatorError(f"--calibration {file} is not UTF-8 text") from None


def _text_of(line: str, where: str) -> str:
    try:
        values = json.loads(line)
        text = values["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise OperatorError(f'{where}: this is no JSON object with "text"') from None
    if not isinstance(text, str):
        raise OperatorError(f'{where}: "text" is no string')
    return text
