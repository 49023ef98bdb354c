"""Messages and tools of a chat, as chat templates know them: in the shapes and orders that each of them takes.

What a template does with an order is seen by trying it: a template that refuses a short talk of that order, or leaves
out what is said in it, gets the messages in another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NotRequired

from typing_extensions import TypedDict

from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.wire.mistakes import missing
from penstock.gateway.wire.schemas import (
    AllowedChoice,
    ChatBody,
    Function,
    FunctionChoice,
    Message,
    NamedFunction,
)
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
            raise missing(f"messages[{i}].content")
        if message.role == "tool" and message.tool_call_id is None:
            raise missing(f"messages[{i}].tool_call_id")
        if message.role == "function" and message.name is None:
            raise missing(f"messages[{i}].name")


def as_dict(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates know it: parts of text are joined, arguments of calls are objects."""
    role = "tool" if message.role == "function" else message.role
    fields: dict[str, Any] = {"role": role, "content": text_of(message)}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    calls = [
        as_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        calls.append(as_call("", message.function_call.name, message.function_call.arguments))
    return fields | ({"tool_calls": calls} if calls else {})


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
        raise missing("functions")
    if not body.tools and body.tool_choice in (None, "none", "auto"):
        return NO_TOOLS
    tools: list[dict[str, Any]] = [dict(tool) for tool in body.tools or ()]
    choice, one_call = body.tool_choice, body.parallel_tool_calls is False
    if isinstance(choice, FunctionChoice):
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


# What templates take

AnyMessage = Mapping[str, Any]
"""A message as one template knows it, which may have fields of its own for some things."""
MessageTransform = Callable[[Sequence[AnyMessage]], Iterable[AnyMessage]]
TemplateCheck = Callable[[Sequence[AnyMessage]], bool]
"""Tells whether a template accepts these messages and shows all their texts."""

ANSWERED = "Done."
"""The assistant's reply to results, where a template wants one before the user's next turn."""
_SYSTEM = ("system", "developer")
_HARMONY = "<|channel|>analysis"
_FIRST_CALL = re.compile(r"tool_calls('\])?\[0\]")
_EACH_CALL = re.compile(r"\bin \w+(\.|\[')tool_calls")
_ROLE_OF_RESULTS = re.compile(r"role('\])? *[!=]= *['\"]tool")


def message_transforms(template: str, shows: TemplateCheck) -> list[MessageTransform]:
    """Returns what has to be done to messages, in this order, before a chat template takes them."""
    own_transforms = _own_transforms(template)

    def fails(roles: str, *more: MessageTransform) -> bool:
        return not shows(apply_transforms(_talk(roles), [*more, *own_transforms]))

    if fails("user"):  # nothing can be seen of such a template
        return own_transforms
    if fails("user calls tool") and not fails("user calls tool", _with_text_arguments):
        own_transforms = [_with_text_arguments, *own_transforms]
    orders = ("system system user", "user assistant system user", "system user assistant system user")
    keeps_words = not fails("user said_calls tool") or fails("user assistant calls tool assistant")
    choices: list[tuple[bool, MessageTransform]] = [
        ("developer" not in template or fails("developer user"), _without_developers),
        (any(map(fails, orders)), _with_one_system),
        (fails("system"), _with_a_user),
        (fails("system user"), _with_system_in_turn),
        (True, _with_results_behind_calls),
        (fails("user tool"), _without_stray_results),
        (fails("user calls user"), _with_a_result_each),
        (fails("user calls tool user"), _with_answers_to_results),
        (fails("user user") or fails("assistant user"), _in_turns),
        (not keeps_words, _with_words_before_calls),
    ]
    return [transform for is_asked, transform in choices if is_asked] + own_transforms


def _own_transforms(template: str) -> list[MessageTransform]:
    """Returns what makes OpenAI's messages those of a template that has fields or roles of its own for them."""
    is_harmony = _HARMONY in template
    choices: list[tuple[bool, MessageTransform]] = [
        ("tool_plan" in template, _with_plans),
        (
            "observation" in template and "metadata" in template and "tool_calls" not in template,
            _with_observations,
        ),
        (bool(_FIRST_CALL.search(template)) and not _EACH_CALL.search(template), _one_call_each),
        ("tool_responses" in template and not _ROLE_OF_RESULTS.search(template), _with_responses),
        (is_harmony, _without_past_reasoning),
        (is_harmony or "<|tool_call>" in template, _with_reasons_for_calls),
        (True, _with_thinking),
    ]
    return [transform for is_asked, transform in choices if is_asked]


def apply_transforms(
    messages: Sequence[AnyMessage], transforms: Iterable[MessageTransform]
) -> Sequence[AnyMessage]:
    """Returns the messages in the shapes that a template takes."""
    for transform in transforms:
        messages = list(transform(messages))
    return messages


def _talk(roles: str) -> list[AnyMessage]:
    """A talk of these roles, in which each says something of its own; `calls` is an assistant that calls a tool."""
    function = {"name": "probe", "arguments": {"text": "called"}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    kinds: dict[str, AnyMessage] = {
        "tool": {"role": "tool", "tool_call_id": "call00001", "name": "probe"},
        "calls": {"role": "assistant", "content": "", "tool_calls": calls},
        "said_calls": {"role": "assistant", "tool_calls": calls},
    }
    named = enumerate(roles.split())
    return [{"content": f"words {number}", **kinds.get(role, {"role": role})} for number, role in named]


def _with_a_user(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields the last message as a user's, if all are the system's."""
    is_alone = all(message["role"] in _SYSTEM for message in messages)
    for i, message in enumerate(messages):
        yield {**message, "role": "user"} if is_alone and i + 1 == len(messages) else message


def _with_system_in_turn(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields what the system says before the words of the first user's turn, as Gemma 3's template does."""
    texts = [message["content"] for message in messages if message["role"] in _SYSTEM]
    for message in messages:
        if message["role"] == "user" and texts:
            yield {**message, "content": "\n\n".join([*texts, message["content"]])}
            texts = []
        elif message["role"] not in _SYSTEM:
            yield message


def _with_results_behind_calls(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields results directly behind the message that has their calls, and in the order in which they came.

    Some clients give calls of each turn the same ids: a result is that of the last call before it.
    """
    callers: dict[str, int] = {}
    results: dict[int, list[AnyMessage]] = {}
    rest: list[tuple[int, AnyMessage]] = []
    for i, message in enumerate(messages):
        caller = callers.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        if caller is None:
            rest.append((i, message))
        else:
            results.setdefault(caller, []).append(message)
        callers |= {call["id"]: i for call in message.get("tool_calls", ())}
    for i, message in rest:
        yield from (message, *results.get(i, ()))


def _without_stray_results(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields results whose calls are not there, for the client has cut them off, as words of a user."""
    call_ids: set[str] = set()
    for message in messages:
        call_ids |= {call["id"] for call in message.get("tool_calls", ())}
        is_stray = message["role"] == "tool" and message.get("tool_call_id") not in call_ids
        yield {"role": "user", "content": message["content"]} if is_stray else message


def _with_a_result_each(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields an empty result for each call that has none, but for those that end the conversation."""
    for message, results in _with_results(messages):
        yield from (message, *results)
        call_ids = {result.get("tool_call_id") for result in results}
        for call in message.get("tool_calls", ()) if message is not messages[-1] else ():
            if call["id"] not in call_ids:
                name = call["function"]["name"]
                yield {"role": "tool", "tool_call_id": call["id"], "name": name, "content": ""}


def _with_answers_to_results(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields an assistant's answer between results and what a user says next: Mistral's templates refuse it else."""
    before = ""
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": ANSWERED}
        yield message
        before = message["role"]


def _in_turns(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields turns of user and assistant that alternate, the user's first: what one says twice in a row is one turn.

    Empty words of the assistant are left out.
    """
    turns: list[list[AnyMessage]] = []
    for message in messages:
        role, before = message["role"], turns[-1][-1] if turns else None
        if role == "assistant" and not (message["content"] or message.get("tool_calls")):
            continue
        if before is not None and before["role"] == role != "tool" and not before.get("tool_calls"):
            turns[-1].append(message)
            continue
        if role == "assistant" and (before is None or before["role"] in _SYSTEM):
            turns.append([{"role": "user", "content": ""}])
        turns.append([message])
    yield from map(_joined, turns)


def _joined(turn: Sequence[AnyMessage]) -> AnyMessage:
    words = "\n\n".join(message["content"] for message in turn if message["content"])
    return {name: value for message in turn for name, value in message.items()} | {"content": words}


def _with_plans(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields what is said before calls under the name that Cohere's templates have for it, too."""
    for message in messages:
        has_plan = message["content"] and message.get("tool_calls")
        yield {**message, "tool_plan": message["content"]} if has_plan else message


def _with_words_before_calls(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields what is said before calls as a message of its own: Llama 3's templates leave it out else."""
    for message in messages:
        if message["content"] and message.get("tool_calls"):
            yield {"role": "assistant", "content": message["content"]}
            message = {**message, "content": ""}
        yield message


def _with_text_arguments(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields calls whose arguments are JSON's text, for templates that do not take objects."""
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        yield {**message, "tool_calls": calls} if calls else message


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_one_system(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields all that the system says first as one message, and what it says later as a user's.

    The templates of gpt-oss and MiniMax M2 leave out what the system says in any but the first message, that of
    DeepSeek R1's in any but the last; those of Qwen 3.5 and 3.6 refuse it.
    """
    first = list(takewhile(lambda message: message["role"] in _SYSTEM, messages))
    if first:
        yield {**first[0], "content": "\n\n".join(message["content"] for message in first)}
    for message in messages[len(first) :]:
        yield {**message, "role": "user"} if message["role"] in _SYSTEM else message


def _without_developers(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields the messages with "system" for OpenAI's newer name of that role."""
    for message in messages:
        yield {**message, "role": "system"} if message["role"] == "developer" else message


def _with_observations(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields the messages with calls as metadata and results as observations, as GLM-4-0414's template has them."""
    for message in messages:
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            yield {**message, "role": "observation"}
        elif message["content"] or not calls:
            yield message
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield {"role": "assistant", "metadata": name, "content": _as_text(arguments)}


def _one_call_each(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields each call in a message of its own, and its result behind it: Llama 3's and gpt-oss's show one alone."""
    for message, results in _with_results(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield from (message, *results)
            continue
        for call in calls:
            yield {**message, "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
            message = {"role": "assistant", "content": ""}
        call_ids = [call["id"] for call in calls]
        yield from (result for result in results if result.get("tool_call_id") not in call_ids)


def _with_responses(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields results within the message that has their calls, as Gemma 4's first template looks for them."""
    for message, results in _with_results(messages):
        names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        responses = [
            {"name": names.get(result.get("tool_call_id"), "unknown"), "response": result["content"]}
            for result in results
        ]
        yield {**message, "tool_responses": responses} if responses else message


def _with_results(messages: Sequence[AnyMessage]) -> Iterator[tuple[AnyMessage, list[AnyMessage]]]:
    """Yields each message together with the results that follow its calls."""
    i = 0
    while i < len(messages):
        behind = messages[i + 1 :] if messages[i].get("tool_calls") else ()
        results = list(takewhile(lambda message: message["role"] == "tool", behind))
        yield messages[i], results
        i += 1 + len(results)


def _with_thinking(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields the messages with reasoning under the name that LFM 2.5's and gpt-oss's templates have for it, too."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        yield {**message, "thinking": reasoning} if reasoning else message


def _without_past_reasoning(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields earlier answers without reasoning, in whose place gpt-oss's template would leave the answer out."""
    for message in messages[:-1]:
        is_answer = message["content"] and not message.get("tool_calls")
        yield {**message, "reasoning_content": ""} if is_answer else message
    yield from messages[-1:]


def _with_reasons_for_calls(messages: Sequence[AnyMessage]) -> Iterator[AnyMessage]:
    """Yields what is said before calls as the end of their reasoning.

    gpt-oss's template takes one of the two alone; Gemma 4's puts what is said behind the calls and ends the turn.
    """
    for message in messages:
        said = (message.get("reasoning_content"), message["content"])
        if message["content"] and message.get("tool_calls"):
            message = {**message, "content": "", "reasoning_content": "\n".join(filter(None, said))}
        yield message
