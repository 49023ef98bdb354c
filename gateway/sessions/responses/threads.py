"""Conversations as the model saw them: the tokens that it really generated, kept from turn to turn.

A text that a model wrote can often be tokenised in other ways than the one it chose. If a follow-up's prompt were made
from text alone, its KV prefix would end where the first answer's tokens differ. So the tokens are kept, and a new
prompt takes them over wherever they say what the chat template wants said there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from penstock.gateway.store.packing import Tokens
from penstock.gateway.wire.conversation import TemplateMessage
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.tokenizer import Tokenizer

_Message = TypeVar("_Message")
_COMPARED = 4096
"""Tokens that are compared at once."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A Thread is messages, and the context that the last answer to them was generated in.

    The context need not fit the messages: instructions come and go, templates rewrite what is past, clients delete
    messages. What of it can be used is found out when it is extended.
    """

    messages: tuple[TemplateMessage, ...] = ()
    """The messages, without the instructions of any one turn."""
    token_ids: Tokens = ()
    """The prompt and output of the last answer; empty if nothing was generated, or it is not worth keeping."""
    num_written: int = 0
    """The number of pieces of token ids that were written for this thread, those of its past included."""


NO_THREAD = Thread()


def num_chars(message: TemplateMessage) -> int:
    """The number of characters that a message's text takes, about."""
    calls = len(orjson.dumps(message["tool_calls"])) if "tool_calls" in message else 0
    return len(message["content"]) + len(message.get("reasoning_content", "")) + calls


def _role(message: Any) -> str:
    return str(message["role"])


def turns(messages: Sequence[_Message], role_of: Callable[[_Message], str] = _role) -> list[int]:
    """The places at which turns begin: with what a user says, so that calls and their results stay together."""
    return [i for i, message in enumerate(messages) if role_of(message) == "user"]


def since(
    messages: Sequence[_Message], start: int, role_of: Callable[[_Message], str] = _role
) -> tuple[_Message, ...]:
    """The messages without those before `start`; what the system says always stays."""
    system = [message for message in messages[:start] if role_of(message) in ("system", "developer")]
    return (*system, *messages[start:])


def extend(
    prompts: Prompts,
    thread: Thread,
    new_messages: Sequence[TemplateMessage],
    *,
    instructions: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    owner: str | None = None,
) -> list[int]:
    """Makes the prompt for a thread and what is new, with as many of the thread's own tokens as possible.

    Args:
        instructions: a system message to go before all others, in this turn only.
        tools: those that the model is told of.
        variables: what else the chat template may read.
        owner: the tenant whose thread it is; None to remember nothing of its text.

    Raises:
        ApiError: 400, if there is no chat template or it does not take these messages.
    """
    head: list[TemplateMessage] = (
        [] if instructions is None else [{"role": "system", "content": instructions}]
    )
    messages = [*head, *thread.messages, *new_messages]
    wanted = prompts.chat(messages, tools=tools, variables=variables, owner=owner)
    # A thread can be older than the model that is served now.
    is_ours = max(thread.token_ids, default=0) < prompts.tokenizer.vocab_size
    return splice(prompts.tokenizer, list(thread.token_ids), wanted) if is_ours else wanted


def splice(tokenizer: Tokenizer, old: list[int], new: list[int]) -> list[int]:
    """Makes tokens that say what `new` says, the first of them as in `old` for as long as both say the same.

    Special tokens cut both into runs. To say the same is to have the same special tokens around runs of the same text.
    """
    special = tokenizer.special_ids
    i = j = _last_cut(old, new, special)
    while True:
        a, b = _end_of_run(old, i, special), _end_of_run(new, j, special)
        if not _same_text(tokenizer, old[i:a], new[j:b]):
            return [*old[:i], *_continue_run(tokenizer, old[i:a], new[j:b]), *new[b:]]
        i, j = a, b
        if i == len(old) or j == len(new) or old[i] != new[j]:
            return [*old[:i], *new[j:]]
        i, j = i + 1, j + 1


def _last_cut(old: list[int], new: list[int], special: frozenset[int]) -> int:
    """The place behind the last special token that both have in common before they differ; 0 if there is none."""
    most = min(len(old), len(new))
    place = 0
    while place < most and old[place : place + _COMPARED] == new[place : place + _COMPARED]:
        place += _COMPARED
    place = min(place, most)
    while place and old[place - 1] not in special:
        place -= 1
    return place


def _end_of_run(token_ids: list[int], start: int, special: frozenset[int]) -> int:
    return next((i for i in range(start, len(token_ids)) if token_ids[i] in special), len(token_ids))


def _same_text(tokenizer: Tokenizer, old: list[int], new: list[int]) -> bool:
    return old == new or _text(tokenizer, old) == _text(tokenizer, new)


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special=False)


def _continue_run(tokenizer: Tokenizer, old: list[int], new: list[int]) -> list[int]:
    """Makes `old` go on with what `new` says after it; returns `new` if that cannot be."""
    old_text, text = _text(tokenizer, old), _text(tokenizer, new)
    if not old_text:
        return new
    run = [*old, *tokenizer.encode(text[len(old_text) :])]
    # It may begin otherwise; and some tokenizers put a space before every text that they encode.
    return run if _text(tokenizer, run) == text else new
