"""How much a model may reason: what requests say of it, as a level or as a number of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import Field

from penstock.gateway.http.errors import invalid
from penstock.gateway.wire.strict import StrictBody

BUDGETS: Mapping[str, tuple[int, int]] = {
    "none": (0, 1),
    "minimal": (512, 16),
    "low": (1024, 8),
    "medium": (8192, 4),
    "high": (24_576, 2),
}
"""The tokens of a level where the chat template knows none, and the part of the context that they may be at most."""


class Reasoned(StrictBody):
    """The fields of a request for an answer that may begin with reasoning."""

    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """-1 stands for no bound, whatever the effort."""
    thinking_budget_tokens: Annotated[int, Field(ge=-1)] | None = None
    """llama.cpp's name of the same."""

    @property
    def effort(self) -> str | None:
        """The level."""
        return None

    @property
    def num_thinking(self) -> int | None:
        """The number of tokens.

        Raises:
            ApiError: 400, if it is given twice.
        """
        given = [self.thinking_token_budget, self.thinking_budget_tokens]
        if None not in given:
            message = "Give 'thinking_token_budget' or 'thinking_budget_tokens', not both."
            raise invalid(message, "thinking_budget_tokens")
        return max((number for number in given if number is not None), default=None)

    def budget(self, variables: Collection[str], context_length: int) -> int | None:
        """Returns how many tokens of reasoning there may be; None without a bound.

        Args:
            variables: those that the chat template reads.
        """
        number, effort = self.num_thinking, self.effort
        if number is not None:
            return None if number == -1 else number
        if effort is None:
            return None
        if "reasoning_effort" in variables or effort not in BUDGETS:
            return None
        most, part = BUDGETS[effort]
        return min(most, context_length // part)
