"""How much a model may reason: what requests say of it, as a level or as a number of tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from penstock.gateway.errors import invalid
from penstock.gateway.wire.strict import StrictBody, TolerantBody

Value = TypeVar("Value")

BUDGETS: Mapping[str, tuple[int, int]] = {
    "none": (0, 1),
    "minimal": (512, 16),
    "low": (1024, 8),
    "medium": (8192, 4),
    "high": (24_576, 2),
}
"""The tokens of a level where the chat template knows none, and the part of the context that they may be at most."""


def plain_effort(effort: str) -> str:
    """Returns the level that templates know for one of Anthropic's or Ollama's."""
    return "high" if effort in ("xhigh", "max") else effort


class ThinkingSwitch(TolerantBody):
    """`thinking` of the APIs of GLM, Kimi and DeepSeek, which is Anthropic's."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=-1)] | None = None

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningChoice(StrictBody):
    """`reasoning` of OpenRouter's API."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether it is left out of the reply."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken: the reply has the reasoning itself."""


NO_CHOICE = ReasoningChoice()
REASONING_FIELDS = {"enable_thinking", "reasoning", "reasoning_effort", "thinking", "thinking_token_budget"}


class Reasoned(StrictBody):
    """The fields of a request for an answer that may begin with reasoning."""

    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """-1 stands for no bound, whatever the effort."""
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | bool | None = None

    @property
    def effort(self) -> str | None:
        """The level."""
        return None

    def switches(self) -> dict[str, bool | None]:
        """The fields that turn reasoning on or off."""
        thinking = self.thinking.is_on if isinstance(self.thinking, ThinkingSwitch) else self.thinking
        return {"enable_thinking": self.enable_thinking, "thinking": thinking}

    def budgets(self) -> dict[str, int | None]:
        """The fields that bound its tokens."""
        in_switch = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingSwitch) else None
        return {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking.budget_tokens": in_switch,
        }

    @property
    def is_on(self) -> bool | None:
        """Whether reasoning is turned on or off; raises 400 if it is both."""
        return agreed(self.switches())

    @property
    def num_thinking(self) -> int | None:
        """The number of tokens, which is 0 if reasoning is off; raises 400 for two numbers."""
        number = agreed(self.budgets())
        return 0 if self.is_on is False else number

    @property
    def asked_by(self) -> str | None:
        """The field that says how much it may reason: a number before a level, and that before a switch."""
        given = {**self.budgets(), "reasoning_effort": self.effort, **self.switches()}
        return next((field for field, value in given.items() if value is not None), None)

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


def agreed(given: Mapping[str, Value | None]) -> Value | None:
    """Returns the value that these fields have, as far as they are given; raises 400 if there are two."""
    there = {field: value for field, value in given.items() if value is not None}
    first = next(iter(there), "")
    for field, value in there.items():
        if value != there[first]:
            raise invalid(f"Give '{first}' or '{field}', not both.", field)
    return there.get(first)
