"""Histories: messages in the shapes that chat templates look for, where these are not OpenAI's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = Mapping[str, Any]
Shape = Callable[[Sequence[Message]], Iterable[Message]]

_SYSTEM = ("system", "developer")
_HARMONY = "<|channel|>analysis"
_SIGNS_OF_ONE_SYSTEM = (_HARMONY, "<minimax:tool_call>", "System message must be at the beginning")
_FIRST_CALL = re.compile(r"tool_calls('\])?\[0\]")
_EACH_CALL = re.compile(r"\bin \w+(\.|\[')tool_calls")
_ROLE_OF_RESULTS = re.compile(r"role('\])? *[!=]= *['\"]tool")


def shapes(template: str) -> list[Shape]:
    """Returns what has to be done to messages, in this order, before a chat template takes them."""
    is_harmony = _HARMONY in template
    asked: list[tuple[bool, Shape]] = [
        (any(sign in template for sign in _SIGNS_OF_ONE_SYSTEM), _with_one_system),
        ("developer" not in template, _without_developers),
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


def _with_one_system(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields all that the system says first as one message, and what it says later as a user's.

    The templates of gpt-oss and MiniMax M2 leave out what the system says in any but the first message; those of
    Qwen 3.5 and 3.6 refuse it.
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
            content = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield {"role": "assistant", "metadata": name, "content": content}


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
