"""The lengths of recent answers, and the expected rest of a running one.

An answer that was cut off, by its limit or its client, says only that it would have been longer: the share of answers
that are longer than so many tokens is the estimate of Kaplan and Meier (1958).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

_KEPT = 64
_ENOUGH = 8


class Lengths:
    """The lengths of the last answers of a tenant or a lane, those with about the same bounds together.

    The bounds are the limit on the tokens of the answer, and the one on its reasoning, if there is one.
    """

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: dict[tuple[int, int], _Alike] = {}
        """The lengths by bit lengths of the bounds, because exact bounds say nothing about answers with others."""

    def add(self, num_tokens: int, limit: int, num_thinking: int | None = None, *, is_whole: bool) -> None:
        """Takes the length of an answer, and whether it ended by itself."""
        self._alike.setdefault(_class_of(limit, num_thinking), _Alike()).add(num_tokens, is_whole=is_whole)

    def left(self, num_tokens: int, limit: int, num_thinking: int | None = None) -> float | None:
        """Returns how many tokens more are expected of an answer that has so many; None if too little is known."""
        alike = self._alike.get(_class_of(limit, num_thinking))
        return None if alike is None else alike.left(num_tokens, limit - num_tokens)


def _class_of(limit: int, num_thinking: int | None) -> tuple[int, int]:
    return limit.bit_length(), -1 if num_thinking is None else num_thinking.bit_length()


class _Alike:
    """The lengths of the last answers with about the same limit."""

    __slots__ = ("_areas", "_ends", "_last", "_shares")

    def __init__(self) -> None:
        self._last: deque[tuple[int, bool]] = deque(maxlen=_KEPT)
        self._ends = [0]
        """The lengths at which the share changes, ascending."""
        self._shares = [1.0]
        """The share of answers longer than each end."""
        self._areas = [0.0]
        """The mean tokens of answers up to each end."""

    def add(self, num_tokens: int, *, is_whole: bool) -> None:
        self._last.append((num_tokens, is_whole))
        self._ends, self._shares, self._areas = [0], [1.0], [0.0]
        ordered = sorted(self._last)
        for number, (end, ended) in enumerate(ordered):
            share = self._shares[-1]
            self._areas.append(self._areas[-1] + share * (end - self._ends[-1]))
            self._ends.append(end)
            self._shares.append(share * (1.0 - 1.0 / (len(ordered) - number)) if ended else share)

    def left(self, num_tokens: int, most: int) -> float | None:
        """Returns how many tokens more are expected, at most as many as are allowed."""
        if len(self._last) < _ENOUGH:
            return None
        place = bisect_right(self._ends, num_tokens) - 1
        share = self._shares[place]
        if share <= 0.0:  # none was as long
            return min(most, 1 + num_tokens / 2)
        # Nothing is known of what is longer than all that was seen.
        until = min(num_tokens + most, 1 + 2 * max(self._ends[-1], num_tokens))
        return min(most, (self._area(until) - self._area(num_tokens)) / share)

    def _area(self, until: float) -> float:
        place = bisect_right(self._ends, until) - 1
        return self._areas[place] + self._shares[place] * (until - self._ends[place])
