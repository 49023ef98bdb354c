"""Messages and tools of a chat, as chat templates know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.wire.schemas import AllowedChoice, ChatBody, Function, Message, NamedFunction, NamedTool
from penstock.gateway.wire.tools.use import NO_TOOLS, ToolUse, tool_use

_LIMITS = Limits()
"""The limits on the JSON in arguments."""


class TemplateMessage(TypedDict):
    """A message as chat templates know it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


def thinking_switches(on: bool) -> dict[str, Any]:
    """Returns the variables by which chat templates turn reasoning on or off; others take no notice of them."""
    return {"enable_thinking": on, "thinking": on}


def check_messages(messages: Sequence[Message]) -> None:
    """Raises 400 for a message that lacks what its role must have."""
    for i, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise _missing(f"messages[{i}].content")
        if message.role == "tool" and message.tool_call_id is None:
            raise _missing(f"messages[{i}].tool_call_id")
        if message.role == "function" and message.name is None:
            raise _missing(f"messages[{i}].name")


def _missing(field: str) -> ApiError:
    return invalid(f"You must provide the parameter '{field}'.", field, "missing_required_parameter")


def as_dict(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates know it: parts of text are joined, arguments of calls are objects."""
    role = "tool" if message.role == "function" else message.role
    found: dict[str, Any] = {"role": role, "content": text_of(message)}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    calls = [
        as_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        calls.append(as_call("", message.function_call.name, message.function_call.arguments))
    return found | ({"tool_calls": calls} if calls else {})


def text_of(message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def as_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call of a tool as chat templates know it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": object_of(arguments)}}


def object_of(arguments: str) -> dict[str, Any] | str:
    """Parses arguments; those that are no JSON object stay text, for a model may have written that."""
    if not arguments.strip():
        return {}
    try:
        return parse_object(arguments.encode(), _LIMITS)
    except ApiError:
        return arguments


def num_chars_of(messages: Sequence[Message], use: ToolUse) -> int:
    """Counts the characters that the template will read, about."""
    return sum(map(_num_chars, messages)) + (use.num_chars if use.tools else 0)


def _num_chars(message: Message) -> int:
    calls = [call.function for call in message.tool_calls or ()]
    texts = (text_of(message), message.reasoning_content or message.reasoning or "")
    return sum(map(len, texts)) + sum(len(call.name) + len(call.arguments) for call in calls)


def chat_tools(body: ChatBody) -> ToolUse:
    """Returns the tools of a chat; raises 400 if the choice and the tools do not fit each other."""
    if body.functions is not None:
        return _function_use(body, body.functions)
    if body.function_call not in (None, "none", "auto"):
        raise _missing("functions")
    if not body.tools and body.tool_choice in (None, "none", "auto"):
        return NO_TOOLS
    tools: list[dict[str, Any]] = [dict(tool) for tool in body.tools or ()]
    choice, one_call = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        return tool_use(tools, "required", [choice.function.name], one_call=True)
    if isinstance(choice, AllowedChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return tool_use(tools, choice.allowed_tools.mode, names, one_call=one_call)
    return tool_use(tools, choice or "auto", one_call=one_call)


def _function_use(body: ChatBody, functions: Sequence[Function]) -> ToolUse:
    """Returns the tools that the older form, `functions`, asks for: at most one of them is called."""
    if body.tools is not None or body.tool_choice is not None:
        raise invalid(
            "Give 'tools' and 'tool_choice', or 'functions' and 'function_call', not both.", "functions"
        )
    tools = [{"type": "function", "function": dict(function)} for function in functions]
    choice, fields = body.function_call or "auto", ("functions", "function_call")
    if isinstance(choice, NamedFunction):
        return tool_use(tools, "required", [choice.name], one_call=True, fields=fields)
    return tool_use(tools, choice, one_call=True, fields=fields)
