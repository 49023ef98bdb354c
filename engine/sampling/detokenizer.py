"""Token ids to text, one at a time, and never half a character."""

from __future__ import annotations

import codecs
from typing import Protocol

from engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Tokens that one character of UTF-8 can be spread over."""


class Detokenizer(Protocol):
    """Text of a growing sequence. All that `push` and `flush` return, joined, is the text of the whole sequence."""

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left when no more tokens come: incomplete characters as U+FFFD."""


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return ByteLevelDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer)


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is bytes: an incremental UTF-8 decoder does it all."""

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of tokens with and without the new ones, and takes the difference.

    The window starts where the text was last certain, so that what the decoder does at the start of a text (dropping a
    leading space) and between tokens (joining bytes) happens the same way on both sides.
    """

    __slots__ = ("_shown", "_start", "_token_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._token_ids.append(token_id)
        before, after = self._decode(self._shown), self._decode(len(self._token_ids))
        incomplete = len(self._token_ids) - self._shown < _LONGEST_CHARACTER and after.endswith(_REPLACEMENT)
        if incomplete:
            return ""
        self._start, self._shown = self._shown, len(self._token_ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._shown), self._decode(len(self._token_ids))
        self._start = self._shown = len(self._token_ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._token_ids[self._start : end], skip_special=False)
