"""Tokens that a request rules out: all but the ones that it allows, and those that would end one of its bad words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Words = tuple[tuple[int, ...], ...]


class Bans:
    """The tokens that `allowed_token_ids` and `bad_words` allow next, a function of the output so far.

    A set of tokens is a number with a bit for each.

    Attributes:
        reach: as many of the tokens before are looked at.
    """

    def __init__(self, allowed: Sequence[int], bad_words: Words) -> None:
        """
        Args:
            allowed: the only tokens there may be; empty if all may.
        """
        self._allowed = bits_of(allowed) if allowed else -1
        self._single = bits_of(word[0] for word in bad_words if len(word) == 1)
        self._longer: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Words of several tokens, by the last but one."""
        for word in bad_words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self.reach = max(map(len, bad_words), default=1) - 1

    def kept(self, tokens: int, before: Sequence[int]) -> int:
        """The tokens, of some, that may come after others. What ends a bad word may, if nothing else is left."""
        return without(tokens & self._allowed, self._ends(before))

    def may_follow(self, token_id: int, before: Sequence[int]) -> bool:
        """Whether a token may come after others, as long as something else may, too."""
        return bool((self._allowed & ~self._ends(before)) >> token_id & 1)

    def _ends(self, before: Sequence[int]) -> int:
        """The tokens that would end a bad word."""
        if not before:
            return self._single
        ends = [
            word[-1]
            for word in self._longer.get(before[-1], ())
            if tuple(before[1 - len(word) :]) == word[:-1]
        ]
        return self._single | bits_of(ends)


def bits_of(token_ids: Iterable[int]) -> int:
    """The set of these tokens."""
    found = list(token_ids)
    bits = bytearray(max(found, default=-1) // 8 + 1)
    for token_id in found:
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")


def without(tokens: int, banned: int) -> int:
    """The tokens that are not banned; all of them if that leaves none."""
    return (tokens & ~banned) or tokens
