"""Remembers the tokens of long rendered conversations, so that the next turn of one is tokenised from where it is new.

A special token cuts a text: what comes after it is tokenised alike whatever stands before it. So the tokens of a text
up to its last special token are those of every text that begins like it. Each tenant has texts of its own, or the time
that a prompt takes would tell others that somebody has sent its beginning.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from sys import getsizeof

from penstock.gateway.wire.tokenizer import Tokenizer

LEAST_CHARS = 32 * 1024
"""Shorter texts are tokenised within some milliseconds."""
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Beginning:
    """A text up to the end of a special token, and its tokens."""

    text: str
    token_ids: array[int]
    mark: str
    """The text of that special token."""

    @property
    def num_bytes(self) -> int:
        return getsizeof(self.text) + self.token_ids.itemsize * len(self.token_ids)


class RenderedTexts:
    """Encodes rendered conversations. It may be used from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, least_chars: int = LEAST_CHARS, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self.least_chars, self._most_bytes = least_chars, most_bytes
        self._cutting: frozenset[int] = getattr(tokenizer, "cutting_ids", frozenset())
        self._known: OrderedDict[_Beginning, str] = OrderedDict()
        """The owner of each beginning, the one used longest ago first."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, owner: str) -> list[int]:
        """Returns the tokens of a text, in which special tokens are written out.

        Args:
            text: shorter ones than `least_chars` are not worth it.
            owner: beginnings are shared by the texts of one owner.
        """
        if not self._cutting:
            return self._encode(text)
        before = self._longest(text, owner)
        token_ids = None if before is None else self._continued(before, text)
        if token_ids is None:
            before, token_ids = None, self._encode(text)
        self._remember(text, token_ids, owner, before)
        return token_ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def _longest(self, text: str, owner: str) -> _Beginning | None:
        with self._lock:
            known = [one for one, its_owner in self._known.items() if its_owner == owner]
        return max(
            (one for one in known if text.startswith(one.text)), key=lambda one: len(one.text), default=None
        )

    def _continued(self, before: _Beginning, text: str) -> list[int] | None:
        """The tokens of a text with this beginning; None if what is new changes the beginning's last token."""
        last, *new = self._encode(before.mark + text[len(before.text) :])
        return [*before.token_ids, *new] if last == before.token_ids[-1] else None

    def _remember(self, text: str, token_ids: list[int], owner: str, before: _Beginning | None) -> None:
        """Remembers a text in place of the one that it goes on from."""
        beginning = self._beginning(text, token_ids)
        with self._lock:
            if before is not None and self._known.pop(before, None) is not None:
                self._num_bytes -= before.num_bytes
                beginning = beginning or before
            if beginning is not None:
                self._known[beginning] = owner
                self._num_bytes += beginning.num_bytes
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= self._known.popitem(last=False)[0].num_bytes

    def _beginning(self, text: str, token_ids: list[int]) -> _Beginning | None:
        """The part of a text up to its last special token; None if it has none, or if others overlap it."""
        place = next((i for i in reversed(range(len(token_ids))) if token_ids[i] in self._cutting), None)
        if place is None:
            return None
        mark = self._tokenizer.token_bytes(token_ids[place]).decode(errors="replace")
        start = text.rfind(mark)
        if start < 0 or self._encode(text[start:]) != token_ids[place:]:
            return None
        return _Beginning(text[: start + len(mark)], array("i", token_ids[: place + 1]), mark)
