"""A journal is the stored form of a recording, from which another process can continue it.

A journal has words of 32 bits. A token is one of them: its id; in a reply of several choices, which take turns, with
the highest bit set if its choice ends with it. Where log probabilities are told they follow: the token's own, as a
float32, and the ids and log probabilities of the most likely tokens at its place, as many as were asked for.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isnan, nan
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.gateway.errors import ApiError
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.recordings.kinds import WriterMaker
from penstock.gateway.sessions.recordings.recording import Recording, Turns
from penstock.gateway.store.interface import Journal, JournalChange
from penstock.gateway.store.packing import TOKEN_BYTES, Tokens

_HEADER_BYTES = 6
"""A token of the prompt takes about so many bytes in a journal's header."""
_WORD_BYTES = 2
"""Making a word of a journal is as much work as reading so many bytes."""
_ENDS = 1 << 31
"""The bit of a token with which its choice ends."""


class CorruptJournal(ValueError):
    """The journal was not written by this version of the server, or not by it at all."""


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[2]
    """The version of the events: servers of one version give the same numbers to the same events."""
    kind: str
    details: dict[str, Any]
    created: int
    detachable: bool
    max_detached_s: float | None
    attempts: int
    """The number of processes that have worked on it."""
    prompt: Tokens
    request: Request
    """The request without its prompt."""


class _End(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: FinishReason
    error: dict[str, Any] | None
    timings: dict[str, Any] | None
    num_cached_tokens: int
    stop: str | None
    """The stop string that ended the first choice, if one did."""


def header_of(recording: Recording) -> bytes:
    header = _Header.model_construct(  # of what is known to be right
        version=2,
        kind=recording.kind,
        details=recording.details,
        created=recording.created,
        detachable=recording.detachable,
        max_detached_s=recording.max_detached_s,
        attempts=recording.attempts,
        prompt=recording.request.prompt_token_ids,
        request=replace(recording.request, prompt_token_ids=(), output_token_ids=(), block_hashes=()),
    )
    return header.model_dump_json().encode()


def end_of(recording: Recording) -> bytes:
    error = recording.error
    end = _End(
        reason=recording.reason,
        error=None if error is None else json.loads(error.body())["error"] | {"status": error.status},
        timings=recording.timings_json,
        num_cached_tokens=recording.num_cached_tokens,
        stop=recording.kept[0].stop,
    )
    return end.model_dump_json().encode()


async def change_of(
    recording: Recording, written: int | None, ttl_s: float, ended_ttl_s: float
) -> JournalChange:
    """The change that the journal lacks of a recording.

    Args:
        written: words that it has; None, if it has not even the header.
        ttl_s: how long it is kept from now on, or `ended_ttl_s` once the recording has ended.
    """
    header = None
    if written is None:
        header = await off_loop(_HEADER_BYTES * recording.num_prompt_tokens, header_of, recording)
    num_words, words = words_of(recording, written or 0)
    is_over = recording.settled and not recording.is_interrupted
    return JournalChange(
        stream_id=recording.id,
        header=header,
        offset=written or 0,
        token_ids=await off_loop(_WORD_BYTES * num_words, words),
        ttl_s=ended_ttl_s if is_over else ttl_s,
        end=end_of(recording) if is_over else None,
        tenant=recording.tenant,
    )


def unwritten_bytes(recording: Recording, written: int | None) -> int:
    """Returns about how many bytes a journal lacks that has so many words; see `change_of`."""
    header = _HEADER_BYTES * recording.num_prompt_tokens if written is None else 0
    num_words = len(recording.token_ids) * _words_each(recording.request)
    return header + TOKEN_BYTES * (num_words - (written or 0))


class Token(NamedTuple):
    """A token that is written down."""

    choice: int
    """The number of its choice."""
    id: int
    logprobs: TokenLogprobs | None
    ends: bool
    """Its choice ends with it; in a reply of one choice that is not written down."""


def words_of(recording: Recording, start: int = 0) -> tuple[int, Callable[[], tuple[int, ...]]]:
    """The words that are written down of a recording's tokens, from that number on, with which a token begins.

    Returns:
        How many words they are, and what makes them, wherever it is called.
    """
    request = recording.request
    first = start // _words_each(request)
    token_ids, logprobs = recording.token_ids[first:], recording.logprobs[first:]
    for place in recording.ends:
        if place >= first:
            token_ids[place - first] |= _ENDS
    num_top = request.sampling.num_logprobs
    if num_top is None:
        return len(token_ids), partial(tuple, token_ids)
    return len(token_ids) * _words_each(request), partial(_words, token_ids, logprobs, num_top)


def _words(token_ids: list[int], logprobs: list[TokenLogprobs], num_top: int) -> tuple[int, ...]:
    words: list[int] = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        words += (token_id, _bits(found.logprob))
        for other, logprob in [*found.top, *((0, nan),) * (num_top - len(found.top))]:
            words += (other, _bits(logprob))
    return tuple(words)


def tokens_of(request: Request, words: tuple[int, ...]) -> Iterator[Token]:
    """Reads what `words_of` made.

    Raises:
        CorruptJournal: they are no tokens of this request's.
    """
    each, turns = _words_each(request), Turns(request.n)
    if len(words) % each:
        raise CorruptJournal("its last token is not whole")
    for start in range(0, len(words), each):
        word, *known = words[start : start + each]
        ends = request.n > 1 and bool(word & _ENDS)
        if turns.next < 0:
            raise CorruptJournal("it has tokens after its end")
        yield Token(turns.next, word & ~_ENDS, _logprobs_of(known) if known else None, ends)
        turns.pass_on(ends=ends)


def _words_each(request: Request) -> int:
    num_top = request.sampling.num_logprobs
    return 1 if num_top is None else 2 + 2 * num_top


def _logprobs_of(words: list[int]) -> TokenLogprobs | None:
    logprob = _float(words[0])
    if isnan(logprob):
        return None
    top = ((other, _float(bits)) for other, bits in zip(words[1::2], words[2::2], strict=True))
    return TokenLogprobs(logprob, tuple(pair for pair in top if not isnan(pair[1])))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


class Replayer(Protocol):
    """A Replayer makes the texts of tokens again, as `engine.planning.stopping.TextSink` does."""

    def replay(
        self, request: Request, token_ids: Collection[int], max_len: int, *, is_whole: bool
    ) -> tuple[list[str], FinishReason | None]: ...


def replay(request: Request, words: tuple[int, ...], *, replayer: Replayer, max_len: int) -> Iterator[Output]:
    """Brings again what the engine brought, as far as it was written down.

    Raises:
        CorruptJournal: as `tokens_of`.
    """
    tokens = list(tokens_of(request, words))
    texts, reasons = [], []
    for index in range(request.n):
        own = [token for token in tokens if token.choice == index]
        is_whole = bool(own) and own[-1].ends
        said, reason = replayer.replay(request, [token.id for token in own], max_len, is_whole=is_whole)
        texts.append(deque(said))
        reasons.append(reason)
    for token in tokens:
        if not (
            left := texts[token.choice]
        ):  # it ends earlier than it did there: the context is shorter here
            continue
        output = Output(request.request_id, token.choice, [token.id], left.popleft())
        output.logprobs = None if token.logprobs is None else [token.logprobs]
        output.finish_reason = None if left else reasons[token.choice]
        yield output


def rebuild(
    journal: Journal,
    now: float,
    writers: Mapping[str, WriterMaker],
    replayed: Callable[[Request, tuple[int, ...]], Iterable[Output]],
    prepare: Callable[[Recording], None] = lambda _: None,
) -> Recording:
    """Makes the recording again, as far as it was written down.

    Args:
        writers: by kind.
        replayed: what the engine brought; see `replay`.
        prepare: called before the recording gets that.

    Raises:
        CorruptJournal: if it cannot be read.
    """
    header, end = _parsed(journal)
    if header.kind not in writers:
        raise CorruptJournal(f"nobody knows the kind {header.kind!r}")
    recording = _recording(header, now, writers[header.kind])
    prepare(recording)
    for output in replayed(recording.request, journal.token_ids):
        recording.push(output)
    recording.go_on()
    if end is not None:
        _end(recording, end)
    return recording


def _parsed(journal: Journal) -> tuple[_Header, _End | None]:
    try:
        header = _Header.model_validate_json(journal.header)
        end = None if journal.end is None else _End.model_validate_json(journal.end)
    except ValidationError as error:
        raise CorruptJournal(f"{error.error_count()} fields are wrong") from None
    if header.request.request_id != journal.stream_id:
        raise CorruptJournal("it is another stream's")
    return header, end


def _recording(header: _Header, now: float, make_writer: WriterMaker) -> Recording:
    recording = Recording(
        replace(header.request, prompt_token_ids=header.prompt, arrival_s=now),
        kind=header.kind,
        details=header.details,
        created=header.created,
        writer=make_writer(header.request, header.created, header.details),
        detachable=header.detachable,
        journalled=True,
        max_detached_s=header.max_detached_s,
    )
    recording.attempts = header.attempts + 1
    return recording


def _end(recording: Recording, end: _End) -> None:
    recording.timings_json = end.timings
    recording.num_cached_tokens = end.num_cached_tokens
    recording.kept[0].stop = end.stop
    recording.cancelled = end.reason is FinishReason.CANCELLED
    if end.error is not None:
        recording.error = _error(end.error)


def _error(fields: dict[str, Any]) -> ApiError:
    return ApiError(
        int(fields.get("status", 500)),
        str(fields.get("message")),
        type=str(fields.get("type")),
        param=fields.get("param"),
        code=fields.get("code"),
    )
