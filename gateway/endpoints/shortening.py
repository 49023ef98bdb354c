"""Shortens conversations that the context has no room for: their oldest turns go, what the system says stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.gateway.http.errors import ApiError

_ANSWER_SHARE = 8


def answer_room(context_length: int) -> int:
    """Returns the part of the context that an answer gets at least where a prompt is shortened."""
    return context_length // _ANSWER_SHARE


async def shortened(
    encode: Callable[[int], Awaitable[list[int]]],
    starts: Sequence[int],
    context_length: int,
    *,
    least_room: int,
    room: int,
) -> list[int]:
    """Returns the prompt without as many of the oldest turns as it takes to fit, but with the last one.

    Args:
        encode: returns the prompt that begins with the turn at a place.
        starts: the places at which turns begin.
        least_room: the tokens of the answer that the whole prompt has to leave room for.
        room: those that a prompt leaves room for which is shortened.
    """

    async def fitting(start: int, room: int) -> list[int] | None:
        try:
            prompt = await encode(start)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        return prompt if len(prompt) + room <= context_length else None

    if (prompt := await fitting(0, least_room)) is not None:
        return prompt
    later = [start for start in starts if start]
    found, low, high = None, 0, len(later)
    while low < high:
        middle = (low + high) // 2
        prompt = await fitting(later[middle], room)
        if prompt is None:
            low = middle + 1
        else:
            found, high = prompt, middle
    return found or await encode(max(later, default=0))
