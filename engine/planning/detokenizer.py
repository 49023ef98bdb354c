"""Token ids to text, one at a time, and never half a character."""

from __future__ import annotations

import codecs
from typing import Protocol

from engine.planning.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Text of a growing sequence, without its special tokens.

    All that `push` and `flush` return, joined, is what the tokenizer decodes the whole sequence to, for any tokens.
    """

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left when no more tokens come: incomplete characters as U+FFFD."""


def make_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return ByteLevelDetokenizer(tokenizer) if tokenizer.is_byte_level else PieceDetokenizer(tokenizer)


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


class PieceDetokenizer:
    """For SentencePiece-like tokenizers, where a token is text, or a byte of a character that has no token.

    A run of byte tokens is certain only when it has ended: should it turn out not to be UTF-8, its decoder gives one
    U+FFFD for every byte of it. The start of a text is not like the rest: a leading space is dropped there.
    """

    __slots__ = ("_begun", "_run", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begun = False
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer.is_byte(token_id):
            self._run.append(token_id)
            return ""
        return self.flush() + self._text([token_id])

    def flush(self) -> str:
        run, self._run = self._run, []
        return self._text(run) if run else ""

    def _text(self, token_ids: list[int]) -> str:
        text = self._tokenizer.continuation(token_ids)
        if self._begun or not text:
            return text
        self._begun = True
        return self._tokenizer.decode(token_ids, skip_special=False)
