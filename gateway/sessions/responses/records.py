"""Responses that have ended, kept in the store for those who ask for them or go on from them.

A response keeps its own input and output, and of what came before only the names of pieces, which it shares with the
responses that it goes on from. So a chain of responses takes space that grows with its length. A response that is
deleted takes nothing from those that went on from it: the pieces are there until nobody has asked for any of them for
`KEPT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from penstock.gateway.errors import answering_unavailable
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.objects import Item, JsonObject, as_messages
from penstock.gateway.sessions.responses.threads import Thread, num_chars
from penstock.gateway.sessions.responses.writer import output_items, plain, response, status_of
from penstock.gateway.store.interface import Store
from penstock.gateway.store.packing import TOKEN_BYTES, pack_tokens, unpack_tokens
from penstock.gateway.store.pieces import PIECE_BYTES, Pieces, cut, join, keep_pieces
from penstock.gateway.store.records import Records
from penstock.gateway.store.time_budget import retrying

KIND = "response"
KEPT_S = 24 * 3600.0
"""A response is kept for so long after it was made or last asked for."""
_PIECES_S = KEPT_S + 60.0
"""Pieces outlive every response that names them."""
_MAX_REWRITES = 4
"""No more pieces of token ids are written for a chain than its last context has, so many times over."""


answering = partial(answering_unavailable, "Kept responses")
"""A store that does not answer is a 503 while this is entered."""


@dataclass(frozen=True, slots=True)
class KeptThread:
    """A KeptThread is a thread as its response's record has it."""

    messages: Pieces
    """Every message is JSON, followed by a comma."""
    token_ids: Pieces
    num_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A KeptResponse is the stored form of one response."""

    object: JsonObject
    input: list[Item]
    thread: KeptThread | None
    """The thread to go on with; None if the response came to no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A StoredResponse is a response from the store, with its whole thread."""

    object: JsonObject
    input: list[Item]
    thread: Thread | None
    """The thread to go on with; None if the response came to no answer."""
    is_broken: bool = False
    """The response came to an answer, and pieces of its thread are gone."""


RECORDS = Records(KIND, KeptResponse, KEPT_S, lambda kept: 4 * PIECE_BYTES + _num_chars(kept.input))


def _num_chars(items: Sequence[Item]) -> int:
    return sum(map(num_chars, as_messages(items)))


def shared_tokens(thread: Thread, prompt: Sequence[int]) -> tuple[int, int]:
    """The number of pieces that a prompt's tokens share with the thread before it, and of those written for that."""
    step, before = PIECE_BYTES // TOKEN_BYTES, list(thread.token_ids)
    num_shared, most = 0, min(len(before), len(prompt)) // step
    while num_shared < most:
        part = slice(num_shared * step, (num_shared + 1) * step)
        if before[part] != list(prompt[part]):
            break
        num_shared += 1
    return num_shared, thread.num_written


def continued(recording: Recording) -> Thread | None:
    """The thread with this turn in it; None, if the turn came to no answer.

    A context that does not begin as the one before it is not worth keeping every time: no prefix is found in a cache by
    it, and a chain of such contexts would take space that grows with the sum of them all.
    """
    if status_of(recording) not in ("completed", "incomplete"):
        return None
    answer = as_messages(output_items(recording))
    messages = (*recording.details["history"], *as_messages(recording.details["input"]), *answer)
    token_ids = (*recording.request.prompt_token_ids, *recording.kept[0].token_ids)
    num_shared, num_written = recording.details.get("shared_tokens", (0, 0))
    num_pieces = TOKEN_BYTES * len(token_ids) // PIECE_BYTES
    after = num_written + num_pieces - num_shared
    if after > _MAX_REWRITES * (num_pieces + 1):
        return Thread(messages, (), num_written)
    return Thread(messages, token_ids, after)


def kept_response(recording: Recording) -> tuple[KeptResponse, dict[str, bytes]]:
    """The record of a response that has ended, and the pieces that it names."""
    thread = continued(recording)
    object, input = plain(response(recording)), recording.details["input"]
    if thread is None:
        return KeptResponse(object=object, input=input, thread=None), {}
    messages, pieces = cut(orjson.dumps(message) + b"," for message in thread.messages)
    packed = pack_tokens(thread.token_ids)
    token_ids, more = cut(packed[start : start + PIECE_BYTES] for start in range(0, len(packed), PIECE_BYTES))
    kept = KeptThread(messages, token_ids, thread.num_written)
    return KeptResponse(object=object, input=input, thread=kept), pieces | more


async def keep(store: Store, recording: Recording) -> None:
    if recording.details["store"]:
        size = TOKEN_BYTES * recording.num_prompt_tokens + recording.num_bytes
        kept, pieces = await off_loop(size, kept_response, recording)
        await keep_pieces(store, recording.tenant, pieces, _PIECES_S)
        await RECORDS.put(store, recording.tenant, recording.id, kept)


async def find(store: Store, tenant: str, response_id: str) -> StoredResponse | None:
    """Finds a response of the tenant's that has ended; from now on it is kept as long as a new one.

    Raises:
        ApiError: 503, if the store does not answer: nobody knows then.
    """
    with answering():
        return await retrying(lambda: _read(store, tenant, response_id))


async def _read(store: Store, tenant: str, response_id: str) -> StoredResponse | None:
    kept = await RECORDS.get(store, tenant, response_id)
    if kept is None:
        return None
    thread = None if kept.thread is None else await _thread(store, tenant, kept.thread)
    is_broken = kept.thread is not None and thread is None
    return StoredResponse(object=kept.object, input=kept.input, thread=thread, is_broken=is_broken)


async def _thread(store: Store, tenant: str, kept: KeptThread) -> Thread | None:
    """Reads a thread, without its token ids if some are gone; None if some of its messages are."""
    messages, token_ids = await asyncio.gather(
        *(join(store, tenant, pieces, _PIECES_S) for pieces in (kept.messages, kept.token_ids))
    )
    if messages is None:
        return None
    return await off_loop(len(messages), _joined, messages, token_ids or b"", kept.num_written)


def _joined(messages: bytes, token_ids: bytes, num_written: int) -> Thread:
    return Thread(tuple(orjson.loads(b"[%b]" % messages.rstrip(b","))), unpack_tokens(token_ids), num_written)
