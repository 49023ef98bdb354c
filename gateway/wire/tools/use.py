"""The use of tools that a request asks for: which ones a reply may call, and which it has to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from penstock.gateway.errors import invalid

Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    tools: Sequence[dict[str, Any]] = ()
    """The tools shown to the model, in the form of chat templates: `{"type": "function", "function": {...}}`."""
    required: frozenset[str] = frozenset()
    """The tools of which one has to be called; empty if the model is free."""
    one_call: bool = False
    """Whether there is at most one call."""

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schemas of the tools' arguments, by the tools' names."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def strict(self) -> frozenset[str]:
        """The tools whose arguments have to match their schemas."""
        functions = [tool["function"] for tool in self.tools]
        return frozenset(function["name"] for function in functions if function.get("strict"))

    @property
    def num_chars(self) -> int:
        """About as many characters as the template will write of the tools."""
        return len(orjson.dumps(self.tools)) if self.tools else 0


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[dict[str, Any]],
    mode: Mode = "auto",
    names: Collection[str] | None = None,
    *,
    one_call: bool = False,
    fields: tuple[str, str] = ("tools", "tool_choice"),
) -> ToolUse:
    """Returns the use of tools that a request asks for.

    Args:
        names: the only tools that may be called; with the mode "auto" the model sees no others.
        fields: of the request, for what is refused.

    Raises:
        ApiError: 400, if one of them is not there, or a name is there twice.
    """
    all_names = [tool["function"]["name"] for tool in tools]
    given, chosen = fields
    if len(set(all_names)) < len(all_names):
        raise invalid(f"Two of the '{given}' have the same name.", given)
    unknown = next((name for name in names or () if name not in all_names), None)
    if unknown is not None:
        raise invalid(f"'{chosen}' names '{unknown}', which is not among the {given}.", chosen)
    if mode == "required" and not all_names:
        raise invalid(f"'{chosen}' asks for a call, but there are no {given}.", chosen)
    if mode == "none":
        return NO_TOOLS
    if mode == "required":
        return ToolUse(
            tools=tools, required=frozenset(all_names if names is None else names), one_call=one_call
        )
    shown = [tool for tool in tools if names is None or tool["function"]["name"] in names]
    return ToolUse(tools=shown, one_call=one_call)
