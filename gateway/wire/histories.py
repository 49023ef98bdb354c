"""Histories: messages in the shapes and the orders that chat templates take, where these are not the client's.

What a template does with an order is seen by trying it: a template that refuses a short talk of that order, or leaves
out what is said in it, gets the messages in another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]
Shape = Callable[[Sequence[Message]], Iterable[Message]]
Shows = Callable[[Sequence[Message]], bool]
"""Tells whether a template accepts these messages and shows all their texts."""

ANSWERED = "Done."
"""The assistant's reply to results, where a template wants one before the user's next turn."""
_SYSTEM = ("system", "developer")
_HARMONY = "<|channel|>analysis"
_FIRST_CALL = re.compile(r"tool_calls('\])?\[0\]")
_EACH_CALL = re.compile(r"\bin \w+(\.|\[')tool_calls")
_ROLE_OF_RESULTS = re.compile(r"role('\])? *[!=]= *['\"]tool")


def shapes(template: str, shows: Shows) -> list[Shape]:
    """Returns what has to be done to messages, in this order, before a chat template takes them."""
    own = _own_shapes(template)

    def fails(roles: str, *more: Shape) -> bool:
        return not shows(_shaped(_talk(roles), [*more, *own]))

    if fails("user"):  # nothing can be seen of such a template
        return own
    if fails("user calls tool") and not fails("user calls tool", _with_text_arguments):
        own = [_with_text_arguments, *own]
    orders = ("system system user", "user assistant system user", "system user assistant system user")
    keeps_words = not fails("user said_calls tool") or fails("user assistant calls tool assistant")
    asked: list[tuple[bool, Shape]] = [
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
    return [shape for is_asked, shape in asked if is_asked] + own


def _own_shapes(template: str) -> list[Shape]:
    """Returns what makes OpenAI's messages those of a template that has fields or roles of its own for them."""
    is_harmony = _HARMONY in template
    asked: list[tuple[bool, Shape]] = [
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
    return [shape for is_asked, shape in asked if is_asked]


def _shaped(messages: Sequence[Message], by: Iterable[Shape]) -> Sequence[Message]:
    for shape in by:
        messages = list(shape(messages))
    return messages


def _talk(roles: str) -> list[Message]:
    """A talk of these roles, in which each says something of its own; `calls` is an assistant that calls a tool."""
    function = {"name": "probe", "arguments": {"text": "called"}}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    kinds: dict[str, Message] = {
        "tool": {"role": "tool", "tool_call_id": "call00001", "name": "probe"},
        "calls": {"role": "assistant", "content": "", "tool_calls": calls},
        "said_calls": {"role": "assistant", "tool_calls": calls},
    }
    named = enumerate(roles.split())
    return [{"content": f"words {number}", **kinds.get(role, {"role": role})} for number, role in named]


def _with_a_user(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the last message as a user's, if all are the system's."""
    is_alone = all(message["role"] in _SYSTEM for message in messages)
    for i, message in enumerate(messages):
        yield {**message, "role": "user"} if is_alone and i + 1 == len(messages) else message


def _with_system_in_turn(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields what the system says before the words of the first user's turn, as Gemma 3's template does."""
    said = [message["content"] for message in messages if message["role"] in _SYSTEM]
    for message in messages:
        if message["role"] == "user" and said:
            yield {**message, "content": "\n\n".join([*said, message["content"]])}
            said = []
        elif message["role"] not in _SYSTEM:
            yield message


def _with_results_behind_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields results directly behind the message that has their calls, and in the order in which they came.

    Some clients give calls of each turn the same ids: a result is that of the last call before it.
    """
    callers: dict[str, int] = {}
    results: dict[int, list[Message]] = {}
    rest: list[tuple[int, Message]] = []
    for i, message in enumerate(messages):
        caller = callers.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        if caller is None:
            rest.append((i, message))
        else:
            results.setdefault(caller, []).append(message)
        callers |= {call["id"]: i for call in message.get("tool_calls", ())}
    for i, message in rest:
        yield from (message, *results.get(i, ()))


def _without_stray_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields results whose calls are not there, for the client has cut them off, as words of a user."""
    known: set[str] = set()
    for message in messages:
        known |= {call["id"] for call in message.get("tool_calls", ())}
        is_stray = message["role"] == "tool" and message.get("tool_call_id") not in known
        yield {"role": "user", "content": message["content"]} if is_stray else message


def _with_a_result_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields an empty result for each call that has none, but for those that end the conversation."""
    for message, results in _with_results(messages):
        yield from (message, *results)
        known = {result.get("tool_call_id") for result in results}
        for call in message.get("tool_calls", ()) if message is not messages[-1] else ():
            if call["id"] not in known:
                name = call["function"]["name"]
                yield {"role": "tool", "tool_call_id": call["id"], "name": name, "content": ""}


def _with_answers_to_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields an assistant's answer between results and what a user says next: Mistral's templates refuse it else."""
    before = ""
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": ANSWERED}
        yield message
        before = message["role"]


def _in_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields turns of user and assistant that alternate, the user's first: what one says twice in a row is one turn.

    Empty words of the assistant are left out.
    """
    turns: list[list[Message]] = []
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


def _joined(turn: Sequence[Message]) -> Message:
    words = "\n\n".join(message["content"] for message in turn if message["content"])
    return {name: value for message in turn for name, value in message.items()} | {"content": words}


def _with_plans(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields what is said before calls under the name that Cohere's templates have for it, too."""
    for message in messages:
        has_plan = message["content"] and message.get("tool_calls")
        yield {**message, "tool_plan": message["content"]} if has_plan else message


def _with_words_before_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields what is said before calls as a message of its own: Llama 3's templates leave it out else."""
    for message in messages:
        if message["content"] and message.get("tool_calls"):
            yield {"role": "assistant", "content": message["content"]}
            message = {**message, "content": ""}
        yield message


def _with_text_arguments(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields calls whose arguments are JSON's text, for templates that do not take objects."""
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        yield {**message, "tool_calls": calls} if calls else message


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_one_system(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields all that the system says first as one message, and what it says later as a user's.

    The templates of gpt-oss and MiniMax M2 leave out what the system says in any but the first message, that of
    DeepSeek R1's in any but the last; those of Qwen 3.5 and 3.6 refuse it.
    """
    first = list(takewhile(lambda message: message["role"] in _SYSTEM, messages))
    if first:
        yield {**first[0], "content": "\n\n".join(message["content"] for message in first)}
    for message in messages[len(first) :]:
        yield {**message, "role": "user"} if message["role"] in _SYSTEM else message


def _without_developers(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages with "system" for OpenAI's newer name of that role."""
    for message in messages:
        yield {**message, "role": "system"} if message["role"] == "developer" else message


def _with_observations(messages: Sequence[Message]) -> Iterator[Message]:
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


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
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
        known = [call["id"] for call in calls]
        yield from (result for result in results if result.get("tool_call_id") not in known)


def _with_responses(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields results within the message that has their calls, as Gemma 4's first template looks for them."""
    for message, results in _with_results(messages):
        names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        responses = [
            {"name": names.get(result.get("tool_call_id"), "unknown"), "response": result["content"]}
            for result in results
        ]
        yield {**message, "tool_responses": responses} if responses else message


def _with_results(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Yields each message together with the results that follow its calls."""
    i = 0
    while i < len(messages):
        behind = messages[i + 1 :] if messages[i].get("tool_calls") else ()
        results = list(takewhile(lambda message: message["role"] == "tool", behind))
        yield messages[i], results
        i += 1 + len(results)


def _with_thinking(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields the messages with reasoning under the name that LFM 2.5's and gpt-oss's templates have for it, too."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        yield {**message, "thinking": reasoning} if reasoning else message


def _without_past_reasoning(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields earlier answers without reasoning, in whose place gpt-oss's template would leave the answer out."""
    for message in messages[:-1]:
        is_answer = message["content"] and not message.get("tool_calls")
        yield {**message, "reasoning_content": ""} if is_answer else message
    yield from messages[-1:]


def _with_reasons_for_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields what is said before calls as the end of their reasoning.

    gpt-oss's template takes one of the two alone; Gemma 4's puts what is said behind the calls and ends the turn.
    """
    for message in messages:
        said = (message.get("reasoning_content"), message["content"])
        if message["content"] and message.get("tool_calls"):
            message = {**message, "content": "", "reasoning_content": "\n".join(filter(None, said))}
        yield message
