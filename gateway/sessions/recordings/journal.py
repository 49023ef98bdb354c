"""A journal is the stored form of a recording, from which another process can continue it.

A journal has words of 32 bits. A token is one of them: its id; in a reply of several choices, which take turns, with
the highest bit set if its choice ends with it. Where log probabilities are told they follow: the token's own, as a
float32, and the ids and log probabilities of the most likely tokens at its place, as many as were asked for.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from math import isnan, nan
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.engine.planning.request import FinishReason, Output, Request, TokenLogprobs
from penstock.engine.text.watermark import Watermark
from penstock.gateway.errors import ApiError
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.recordings.kinds import WriterMaker
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.store.interface import Journal, JournalChange
from penstock.gateway.store.packing import TOKEN_BYTES, Tokens, pack_tokens, unpack_tokens

_HEADER_BYTES = 6
"""A token of the prompt takes about so many bytes in a journal's header."""
_WORD_BYTES = 2
"""Making a word of a journal is as much work as reading so many bytes."""
_ENDS = 1 << 31
"""The bit of a token with which its choice ends."""
_UNTOLD = TokenLogprobs(nan)


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
    """The request without its prompt and its watermark."""
    has_watermark: bool = False
    """Whether its texts have the watermark of the server, whose key is never written down."""


_FACTS = ("kind", "details", "created", "detachable", "max_detached_s", "attempts")


class _End(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: FinishReason
    error: dict[str, Any] | None
    timings: dict[str, Any] | None
    num_cached_tokens: int
    stop: str | None
    """The stop string that ended the first choice, if one did."""


def header_of(recording: Recording) -> bytes:
    request = recording.request
    unmarked = replace(request.sampling, watermark=None)
    header = _Header.model_construct(  # of what is known to be right
        **_facts(recording),
        version=2,
        prompt=request.prompt_token_ids,
        request=replace(
            request, sampling=unmarked, prompt_token_ids=(), output_token_ids=(), block_hashes=()
        ),
        has_watermark=request.sampling.watermark is not None,
    )
    return header.model_dump_json().encode()


def _facts(of: Recording | _Header) -> dict[str, Any]:
    """Returns the fields that a recording and its header have in common."""
    return {name: getattr(of, name) for name in _FACTS}


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
    return header + recording.num_taken * _row(recording.request).size - TOKEN_BYTES * (written or 0)


def words_of(recording: Recording, start: int = 0) -> tuple[int, Callable[[], tuple[int, ...]]]:
    """The words that are written down of a recording's tokens, from that number on, with which a token begins.

    Returns:
        How many words they are, and what makes them, wherever it is called.
    """
    row, counts = _row(recording.request), [len(choice.token_ids) for choice in recording.choices]
    first = start * TOKEN_BYTES // row.size
    sums = partial(_num_in_turns, counts)
    turn = bisect_right(range(max(counts) + 1), first, key=sums) - 1
    marks = recording.request.n > 1
    rests = [
        (choice.token_ids[turn:], choice.logprobs[turn:], marks and choice.ended)
        for choice in recording.choices
    ]
    num_words = (sum(counts) - first) * row.size // TOKEN_BYTES
    return num_words, partial(_words, recording.request, rests, first - sums(turn))


def _num_in_turns(counts: Sequence[int], num_turns: int) -> int:
    """Returns how many tokens choices of so many tokens bring in their first turns."""
    return sum(min(count, num_turns) for count in counts)


_Rest = tuple[list[int], list[TokenLogprobs | None], bool]
"""Tokens of a choice, their log probabilities, and whether the last one is marked as its end."""


def _words(request: Request, rests: Sequence[_Rest], num_written: int) -> tuple[int, ...]:
    """Makes the words of tokens, without the first of them, which were written before."""
    in_turns = [token for turn in zip_longest(*map(_marked, rests)) for token in turn if token is not None]
    num_top = request.sampling.num_logprobs
    if num_top is None:
        return tuple(word for word, _ in in_turns[num_written:])
    pack, none = _row(request).pack, ((0, nan),) * num_top
    return unpack_tokens(
        b"".join(
            pack(word, logprobs.logprob, *chain.from_iterable([*logprobs.top, *none][:num_top]))
            for word, logprobs in ((word, logprobs or _UNTOLD) for word, logprobs in in_turns[num_written:])
        )
    )


def _marked(rest: _Rest) -> Iterator[tuple[int, TokenLogprobs | None]]:
    token_ids, logprobs, ends = rest
    if ends and token_ids:
        token_ids[-1] |= _ENDS
    return zip_longest(token_ids, logprobs)


def _row(request: Request) -> struct.Struct:
    """Returns the words of one token."""
    num_top = request.sampling.num_logprobs
    return struct.Struct("<I" if num_top is None else "<If" + "If" * num_top)


def _outputs(request: Request, words: tuple[int, ...]) -> tuple[list[Output], Collection[int]]:
    """Reads what `words_of` made: outputs without their texts, and the choices that have not ended.

    Raises:
        CorruptJournal: they are no tokens of this request's.
    """
    row, turns, outputs = _row(request), deque(range(request.n)), list[Output]()
    if len(words) * TOKEN_BYTES % row.size:
        raise CorruptJournal("its last token is not whole")
    for word, *rest in row.iter_unpack(pack_tokens(words)):
        if not turns:
            raise CorruptJournal("it has tokens after its end")
        index = turns.popleft()
        if request.n == 1 or not word & _ENDS:
            turns.append(index)
        outputs.append(Output(request.request_id, index, [word & ~_ENDS], "", _logprobs_of(rest)))
    return outputs, turns


def _logprobs_of(values: list[Any]) -> list[TokenLogprobs] | None:
    if not values or isnan(values[0]):
        return None
    top = zip(values[1::2], values[2::2], strict=True)
    return [TokenLogprobs(values[0], tuple(pair for pair in top if not isnan(pair[1])))]


class Replayer(Protocol):
    """A Replayer makes the texts of tokens again, as `engine.planning.text_sink.TextSink` does."""

    def replay(
        self, request: Request, token_ids: Collection[int], max_len: int, *, is_whole: bool
    ) -> tuple[list[str], FinishReason | None]: ...


def replay(request: Request, words: tuple[int, ...], *, replayer: Replayer, max_len: int) -> Iterator[Output]:
    """Brings again what the engine brought, as far as it was written down.

    Raises:
        CorruptJournal: as `_outputs`.
    """
    outputs, unended = _outputs(request, words)
    texts, reasons = [], []
    for index in range(request.n):
        token_ids = [output.token_ids[0] for output in outputs if output.index == index]
        said, reason = replayer.replay(request, token_ids, max_len, is_whole=index not in unended)
        texts.append(deque(said))
        reasons.append(reason)
    for output in outputs:
        left = texts[output.index]
        if left:  # or else it ends earlier than it did there: the context is shorter here
            output.text = left.popleft()
            output.finish_reason = None if left else reasons[output.index]
            yield output


def rebuild(
    journal: Journal,
    now: float,
    writers: Mapping[str, WriterMaker],
    replayed: Callable[[Request, tuple[int, ...]], Iterable[Output]],
    prepare: Callable[[Recording], None] = lambda _: None,
    watermark: Watermark | None = None,
) -> Recording:
    """Makes the recording again, as far as it was written down.

    Args:
        writers: by kind.
        replayed: what the engine brought; see `replay`.
        prepare: called before the recording gets that.
        watermark: the server's.

    Raises:
        CorruptJournal: if it cannot be read.
    """
    header, end = _parsed(journal)
    if header.kind not in writers:
        raise CorruptJournal(f"nobody knows the kind {header.kind!r}")
    if header.has_watermark and watermark is None:
        raise CorruptJournal("this server has no key for its watermark")
    sampling = replace(header.request.sampling, watermark=watermark if header.has_watermark else None)
    recording = Recording(
        replace(header.request, prompt_token_ids=header.prompt, arrival_s=now, sampling=sampling),
        writer=writers[header.kind](header.request, header.created, header.details),
        journalled=True,
        **_facts(header) | {"attempts": header.attempts + 1},
    )
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
