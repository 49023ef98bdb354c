"""A budget for reasoning: when an answer has as many tokens of it as are allowed, the tokens that end it follow.

They take the place of the next chosen token, and are computed in one step like those of a prompt, so no kernel, graph
or draft has to know of budgets. Planning has to know when: no step may build on a token that could be replaced, see
`Sequence.horizon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """The bound on the reasoning of each answer to one prompt."""

    num_tokens: int
    """Output tokens after which reasoning is ended."""
    opening: str
    """The marker that reasoning begins with."""
    closing: str
    """The marker that it ends with."""
    answer: str = ""
    """The marker of the answer, after which no reasoning comes; empty if reasoning comes first or not at all."""
    is_open: bool
    """Whether the prompt ends within reasoning."""
    forced: tuple[int, ...]
    """The tokens that end it: they spell the closing marker, and what the model writes around it."""


class Thinking:
    """One answer's reasoning, a function of its output tokens.

    Markers are looked for in the bytes of tokens, because one may be spelt by several tokens or share one with a text.
    """

    __slots__ = (
        *("_answer", "_bytes_of", "_closing", "_opening"),
        *("_is_open", "_is_over", "_num_forced", "_text", "budget", "num_tokens"),
    )

    def __init__(
        self, budget: ThinkingBudget, bytes_of: Callable[[int], bytes], token_ids: Iterable[int] = ()
    ) -> None:
        """
        Args:
            token_ids: the output tokens that are known already.
        """
        self.budget = budget
        self.num_tokens = 0
        """The output tokens so far."""
        self._bytes_of = bytes_of
        self._opening, self._closing, self._answer = (
            marker.encode() for marker in (budget.opening, budget.closing, budget.answer)
        )
        self._is_open, self._is_over = budget.is_open, False
        self._num_forced = 0
        """The forced tokens that were taken, while there are more to come."""
        self._text = b""
        """The end of the output, as far as a marker may begin in it."""
        for token_id in token_ids:
            self._take(token_id)

    @property
    def num_free(self) -> int | None:
        """The output tokens before the first one that could be replaced; None if none could."""
        return None if self._is_over else max(self.budget.num_tokens, self.num_tokens)

    def follow(self, chosen: Iterable[int]) -> list[int]:
        """Takes the tokens that were chosen next, up to one that is replaced; returns those that follow instead."""
        followed: list[int] = []
        for token_id in chosen:
            due = self._due
            for own_id in due or (token_id,):
                self._take(own_id)
                followed.append(own_id)
            if due:
                break
        return followed

    @property
    def _due(self) -> tuple[int, ...]:
        """The tokens that have to come next; empty if any may."""
        is_spent = self._is_open and self.num_tokens >= self.budget.num_tokens
        return self.budget.forced[self._num_forced :] if is_spent or self._num_forced else ()

    def _take(self, token_id: int) -> None:
        is_due = bool(self._due)
        self.num_tokens += 1
        if not self._is_over:
            self._text += self._bytes_of(token_id)
            while self._read():
                pass
        if is_due:
            self._num_forced = (self._num_forced + 1) % len(self.budget.forced)
            self._is_open &= self._num_forced > 0

    def _read(self) -> bool:
        """Reads the text up to the next marker; returns whether there was one."""
        if self._is_open:
            return self._pass(self._closing, opens=False)
        if self._answer:
            before, found, _ = self._text.partition(self._answer)
            self._is_over = bool(found) and self._opening not in before
            return not self._is_over and self._pass(self._opening, opens=True)
        self._text = self._text.lstrip()
        if self._text.startswith(self._opening):
            return self._pass(self._opening, opens=True)
        self._is_over = not self._opening.startswith(self._text)
        return False

    def _pass(self, marker: bytes, *, opens: bool) -> bool:
        _, found, rest = self._text.partition(marker)
        if not found:
            self._text = self._text[-max(len(marker), len(self._answer)) :]
            return False
        self._text, self._is_open = rest, opens
        self._is_over = not opens and not self._answer
        return not self._is_over
