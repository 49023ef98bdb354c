"""Token ids to text, one at a time, and never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Spelling(Protocol):
    """The part of `engine.text.tokenizer.Tokenizer` that texts are spelt with."""

    is_byte_level: bool
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...

    def piece(self, token_id: int) -> str | None: ...

    def continuation(self, token_ids: Sequence[int]) -> str: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class Detokenizer(Protocol):
    """Text of a growing sequence, without its special tokens but those that are shown.

    All that `push` and `flush` return, joined, is what the tokenizer decodes the other tokens to, for any tokens.
    """

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""

    def flush(self) -> str:
        """Returns the rest when no more tokens come, with incomplete characters as U+FFFD."""


def make_detokenizer(tokenizer: Spelling, shown: frozenset[int] = frozenset()) -> Detokenizer:
    """`shown`: special tokens whose text is shown."""
    hidden = tokenizer.special_ids - shown if shown else tokenizer.special_ids
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else PieceDetokenizer
    return kind(tokenizer, hidden)


class ByteLevelDetokenizer:
    """For byte-level BPE, where a token is bytes: an incremental UTF-8 decoder does it all."""

    __slots__ = ("_decoder", "_hidden", "_tokenizer")

    def __init__(self, tokenizer: Spelling, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """For SentencePiece-like tokenizers, where a token is text, or a byte of a character that has no token of its own.

    The text of a run of byte tokens is certain only when the run has ended: if the run is not UTF-8, the decoder gives
    one U+FFFD for every byte of it. The first token of a text is decoded apart: it loses its leading space there.
    """

    __slots__ = ("_begun", "_hidden", "_run", "_tokenizer")

    def __init__(self, tokenizer: Spelling, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._begun = False
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            self._run.append(token_id)
            return ""
        if not piece:  # an id without a token: the decoder passes over it, and a run of bytes goes on
            return ""
        return self.flush() + self._begin(piece, [token_id])

    def flush(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, []
        return self._begin(self._tokenizer.continuation(run), run)

    def _begin(self, continuation: str, token_ids: list[int]) -> str:
        """The text of these tokens: what they add to a text that has begun, unless they begin it."""
        if self._begun or not continuation:
            return continuation
        self._begun = True
        return self._tokenizer.decode(token_ids, skip_special=False)
