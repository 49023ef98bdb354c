"""Shortens conversations that the context has no room for: their oldest turns go, what the system says stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.gateway.errors import ApiError
from penstock.gateway.wire.sampling import MaxTokens

_ANSWER_SHARE = 8
"""An answer gets at least this part of the context where a prompt is shortened."""


def answer_room(asked: MaxTokens, context_length: int) -> int:
    """Returns the tokens of the answer that a shortened prompt leaves room for."""
    share = max(1, context_length // _ANSWER_SHARE)
    if asked.number is None:
        return share
    return max(1, min(share, asked.number) if asked.may_be_fewer else asked.number)


async def shortened(
    encode: Callable[[int], Awaitable[list[int]]],
    starts: Sequence[int],
    asked: MaxTokens,
    context_length: int,
) -> list[int]:
    """Returns the prompt without as many of the oldest turns as it takes to fit, but with the last one.

    Args:
        encode: returns the prompt that begins with the turn at a place.
        starts: the places at which turns begin.
    """

    async def fitting(start: int, room: int) -> list[int] | None:
        try:
            prompt = await encode(start)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if len(prompt) + room <= context_length else None

    if (prompt := await fitting(0, asked.least)) is not None:
        return prompt
    later, room = [start for start in starts if start], answer_room(asked, context_length)
    longest, low, high = None, 0, len(later)
    while low < high:
        middle = (low + high) // 2
        prompt = await fitting(later[middle], room)
        if prompt is None:
            low = middle + 1
        else:
            longest, high = prompt, middle
    return longest or await encode(max(later, default=0))
