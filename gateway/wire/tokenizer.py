"""The part of a tokenizer that the gateway uses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from penstock.engine.text.detokenizer import Spelling


class Tokenizer(Spelling, Hashable, Protocol):
    """The part of `engine.text.tokenizer.Tokenizer` that the gateway needs."""

    chat_template: str | None
    special_tokens: dict[str, str]

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]: ...

    def spell_out(self, text: str, others: frozenset[int] = frozenset()) -> list[int]: ...


class TokenNumbers:
    """Spells tokens by their ids, as vLLM does for clients that have to tell tokens of one text apart."""

    def token_bytes(self, token_id: int) -> bytes:
        return f"token_id:{token_id}".encode()


TOKEN_NUMBERS = TokenNumbers()
