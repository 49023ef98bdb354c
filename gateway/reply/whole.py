"""Whole replies, made of all output at once; off the event loop if that takes long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from penstock.gateway.off_loop import off_loop
from penstock.gateway.reply.live import LOGPROB_BYTES
from penstock.gateway.wire.frames import json_pieces
from penstock.gateway.wire.writing import Delta, ReplyT, Whole, WholeWriter

_NUMBER_BYTES = 8
"""The bytes whose reading is as much work as writing one number of an embedding, or a score."""
_CHARACTER_BYTES = 8
"""The bytes whose reading is as much work as parsing a character for calls of tools."""


async def whole(writer: WholeWriter[ReplyT], reply: ReplyT, outputs: Iterable[tuple[int, Delta]]) -> Whole:
    """Returns a reply's JSON; lists that may be large are iterators, for `gateway.wire.frames.json_pieces`."""
    outputs = list(outputs)
    return await off_loop(_work(outputs), writer.whole, reply, outputs)


async def whole_json(
    writer: WholeWriter[ReplyT], reply: ReplyT, outputs: Iterable[tuple[int, Delta]]
) -> tuple[bytes, dict[str, Any]]:
    """Returns a reply with choices as JSON, and as what is kept of it: its fields, its choices as JSON.

    Nothing is made of all log probabilities at once, for that would hold the interpreter.
    """
    outputs = list(outputs)

    def make() -> tuple[bytes, dict[str, Any]]:
        fields = writer.whole(reply, outputs)
        assert isinstance(fields, dict)
        choices = b"".join(json_pieces(fields["choices"]))
        body = orjson.dumps({**fields, "choices": orjson.Fragment(choices)})
        return body, {**fields, "choices": choices.decode()}

    num_logprobs = sum(1 + len(one.top) for _, delta in outputs for one in delta.logprobs if one is not None)
    return await off_loop(_work(outputs) + LOGPROB_BYTES * num_logprobs, make)


def _work(outputs: list[tuple[int, Delta]]) -> int:
    """Returns the bytes whose reading is as much work as writing these outputs without their log probabilities."""
    num_numbers = sum(len(delta.embedding or delta.scores or ()) for _, delta in outputs)
    num_characters = sum(len(text) for _, delta in outputs for text in delta.texts)
    return _NUMBER_BYTES * num_numbers + _CHARACTER_BYTES * num_characters
