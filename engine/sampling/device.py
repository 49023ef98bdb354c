"""Sampling that never leaves the device: a row of parameters per slot, and R rows of logits to R tokens.

A sequence has a slot as long as it runs. What `SamplingBatch` holds for a step is kept here for a sequence, written
once by asynchronous copies; a step then needs nothing from the host but which slots it samples. Every shape is static
and nothing waits for the device, so that a step can be captured as a graph.

`choose` is plain torch, on any device, and the reference of faster ones. Its tokens are those of `sampler.sample`: the
same arithmetic, row by row, and the same ties: what equals the last that top-k or top-p keeps is kept, and of equal
largest logits the first is the argmax. Exponentials and sums in float64 may be rounded otherwise on another device, so
that a token can differ where a border between two, or top-p's share, lies within some 10^-13 of the random number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.planning.request import SamplingParams, Sequence
from engine.sampling.batch import split_mix

ROW = np.dtype(
    [
        ("key", np.uint64),
        ("log_min_p", np.float64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("min_tokens", np.int32),
        ("num_biases", np.int32),
        ("counts_row", np.int32),
        ("unused", np.int32),
    ]
)
"""One slot's parameters as they lie in memory. `counts_row` is -1 where there are no penalties; 0 in `top_k` is off."""

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Needs:
    """What some row of a step asks for. What no row needs is left out of the step; no token depends on it."""

    top_k: bool = True
    top_p: bool = True
    num_top_logprobs: int = 0

    @property
    def filters(self) -> Needs:
        """Of these the ones that decide the token."""
        return Needs(self.top_k, self.top_p)


FILTERS = tuple(Needs(top_k, top_p) for top_k, top_p in product((False, True), repeat=2))
"""All that `Needs.filters` may be."""
_NOTHING = FILTERS[0]


@dataclass(frozen=True, slots=True)
class SampledOnDevice:
    token_ids: Tensor
    """[R] int32; -1 where the row's logits were not finite or nothing was allowed, and in padding."""
    logprobs: Tensor
    """[R] float32: raw log probability of the chosen token; NaN where there is none."""
    top_ids: Tensor | None = None
    """[R, k] int32, best first, with `top_logprobs` [R, k] float32: the k most likely before any processing."""
    top_logprobs: Tensor | None = None


class SlotTables:
    """What the device knows of every slot."""

    def __init__(
        self, num_slots: int, vocab_size: int, max_biases: int, max_penalised: int, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.rows = torch.zeros(num_slots, ROW.itemsize, dtype=torch.uint8, device=device)
        self.biases = torch.zeros(num_slots, max_biases, 2, dtype=torch.int32, device=device)
        """Pairs (id, bits of a float32 to add); -1 - id for one that is banned before `min_tokens`."""
        self.counts = torch.zeros(max_penalised, vocab_size, dtype=torch.int32, device=device)
        """Twice the times a token is in the output, and 1 more if it is in the prompt and that matters."""
        self._by_dtype = {dtype: self.rows.view(dtype) for dtype in _TORCH_DTYPES.values()}
        self.column("counts_row").fill_(-1)

    def column(self, name: str) -> Tensor:
        """[num_slots] of one field of ROW; keys as int64."""
        field, offset = ROW.fields[name][:2]  # type: ignore[index]
        return self._by_dtype[_TORCH_DTYPES[field.str[1:]]][:, offset // field.itemsize]

    def view(self, dtype: torch.dtype) -> Tensor:
        """`rows` read as that type."""
        return self._by_dtype[dtype]

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in (self.rows, self.biases, self.counts))


_TORCH_DTYPES = {"u8": torch.int64, "f8": torch.float64, "f4": torch.float32, "i4": torch.int32}


class Choose(Protocol):
    @property
    def num_bytes(self) -> int:
        """Of device memory that it keeps."""

    def __call__(
        self, logits: Tensor, tables: SlotTables, slots: Tensor, numbers: Tensor, needs: Needs, /
    ) -> tuple[Tensor, Tensor]:
        """(token ids [R] int32, log probabilities [R] float32); counts the tokens that it chose."""


class DeviceSampler:
    """Owns the slots' tables. All calls from one thread, and their work on one stream, whose order keeps them apart.

    Args:
        max_biases: biased and banned tokens of one request; more are refused.
        max_penalised: sequences with penalties at a time, each of which costs a row of 4 bytes per token of the
            vocabulary; every slot by default.
        choose: what turns logits into tokens.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device,
        *,
        max_biases: int = 1152,
        max_penalised: int | None = None,
        choose: Choose | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        max_penalised = num_slots if max_penalised is None else max_penalised
        self.tables = SlotTables(num_slots, vocab_size, max_biases, max_penalised, device)
        self._device = device
        self._max_biases = max_biases
        self._eos_token_ids = frozenset(eos_token_ids)
        self._choose: Choose = PlainChoose() if choose is None else choose
        self._free_counts = list(range(max_penalised))
        self._held_counts: dict[int, int] = {}
        """By slot, the row of counts that it holds."""
        self._needs: dict[int, Needs] = {}

    def has_room(self, params: SamplingParams) -> bool:
        """Whether a request can be assigned now: it has no penalties, or there is a row of counts for it."""
        return not has_penalties(params) or bool(self._free_counts)

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Writes all that the slot has to know of a sequence; what it held before is gone.

        Raises:
            ValueError: more biased and banned tokens than there is room for.
        """
        params = sequence.request.sampling
        biases = self._biases(params)
        if len(biases) > self._max_biases:
            raise ValueError(f"{len(biases)} tokens with a bias or a ban; {self._max_biases} are the most")
        self.release(slot)
        row = np.zeros(1, ROW)
        row["key"] = split_mix(params.seed, sequence.index)
        row["temperature"], row["top_p"] = params.temperature, params.top_p
        row["top_k"], row["min_tokens"] = min(params.top_k, self.vocab_size), params.min_tokens
        with np.errstate(divide="ignore"):
            row["log_min_p"] = np.log(np.float64(np.float32(params.min_p)))
        row["repetition"], row["presence"] = params.repetition_penalty, params.presence_penalty
        row["frequency"] = params.frequency_penalty
        row["num_biases"] = len(biases)
        row["counts_row"] = self._count(slot, sequence) if has_penalties(params) else -1
        self._needs[slot] = Needs(
            0 < params.top_k < self.vocab_size, params.top_p < 1, params.num_logprobs or 0
        )
        if len(biases):
            self.tables.biases[slot, : len(biases)].copy_(self._staged(biases), non_blocking=True)
        self.tables.rows[slot].copy_(self._staged(row.view(np.uint8)), non_blocking=True)

    def release(self, slot: int) -> None:
        """The slot's sequence has ended. A step in flight may still sample it; none that is launched later may."""
        self._needs.pop(slot, None)
        held = self._held_counts.pop(slot, None)
        if held is not None:
            self._free_counts.append(held)

    def needs(self, slots: Iterable[int]) -> Needs:
        """What a step over these slots needs at least; one that nobody has, or -1, needs nothing."""
        asked = {self._needs.get(slot, _NOTHING) for slot in slots}
        return Needs(
            any(needs.top_k for needs in asked),
            any(needs.top_p for needs in asked),
            max((needs.num_top_logprobs for needs in asked), default=0),
        )

    def sample(
        self, logits: Tensor, slots: Tensor, numbers: Tensor, needs: Needs | None = None
    ) -> SampledOnDevice:
        """One token for each row, counted in its slot for the penalties of the next.

        Args:
            logits: [R, vocab] float32, float16 or bfloat16; not changed.
            slots: [R] int32, -1 for padding; no slot twice.
            numbers: [R] int32, output tokens that the slot's sequence has already.
            needs: at least those of the slots; all filters and no most likely tokens by default.
        """
        needs = Needs() if needs is None else needs
        num_top = needs.num_top_logprobs
        # First: it may find no memory, and what is chosen is counted once.
        top = most_likely(logits, num_top) if num_top else ()
        return SampledOnDevice(*self._choose(logits, self.tables, slots, numbers, needs), *top)

    def _biases(self, params: SamplingParams) -> NDArray[np.int32]:
        """[n, 2] as in SlotTables.biases, every id once."""
        ending = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos_token_ids
        banned = ending if params.min_tokens > 0 else frozenset()
        ids = sorted(i for i in banned | params.logit_bias.keys() if 0 <= i < self.vocab_size)
        entries = np.zeros((len(ids), 2), np.int32)
        entries[:, 0] = [-1 - i if i in banned else i for i in ids]
        entries[:, 1] = np.array([params.logit_bias.get(i, 0.0) for i in ids], np.float32).view(np.int32)
        return entries

    def _count(self, slot: int, sequence: Sequence) -> int:
        """Takes a row of counts and fills it with the sequence's tokens."""
        self._held_counts[slot] = row = self._free_counts.pop()
        num_prompt, token_ids = sequence.num_prompt_tokens, np.array(sequence.token_ids, np.int64)
        ids, counts = np.unique(token_ids[num_prompt:], return_counts=True)
        codes = 2 * counts
        if sequence.request.sampling.repetition_penalty != 1:
            prompt_ids = np.unique(token_ids[:num_prompt])
            codes = np.concatenate((codes + np.isin(ids, prompt_ids), np.ones(prompt_ids.size, np.int64)))
            ids = np.concatenate((ids, prompt_ids))
            ids, first = np.unique(ids, return_index=True)
            codes = codes[first]
        counts_row = self.tables.counts[row].zero_()
        if ids.size:
            counts_row.scatter_(0, self._staged(ids), self._staged(codes.astype(np.int32)))
        return row

    def _staged(self, array: NDArray[np.generic]) -> Tensor:
        """On the device, by way of pinned memory that torch does not use again before the copy is done."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def most_likely(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """[R, num] ids (int32) and raw log probabilities of the most likely tokens of each row, best first."""
    values, token_ids = logits.float().topk(min(num, logits.shape[-1]))
    return token_ids.to(torch.int32), values - logits.float().logsumexp(-1, keepdim=True)


def choose(
    logits: Tensor, tables: SlotTables, slots: Tensor, numbers: Tensor, needs: Needs
) -> tuple[Tensor, Tensor]:
    """Plain torch, on any device."""
    rows = _Rows(tables, slots, numbers)
    raw = logits.float()
    processed = _penalised(_biased(raw, rows), rows)
    peaks = processed.amax(-1, keepdim=True)
    drawn = _drawn(processed - peaks, rows, needs)
    chosen = torch.where(rows.column("temperature") > 0, drawn, processed.argmax(-1))
    usable = rows.present & raw.isfinite().all(-1) & (peaks.squeeze(-1) > -torch.inf)
    logprobs = raw.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    _count_chosen(chosen, usable, rows)
    return (
        torch.where(usable, chosen, -1).to(torch.int32),
        torch.where(usable, logprobs, torch.nan),
    )


class PlainChoose:
    """`choose`, of which nothing stays on the device."""

    num_bytes = 0

    def __init__(self, *_: object) -> None:
        """Takes what makes others: rows at most, vocabulary, device."""

    __call__ = staticmethod(choose)


class _Rows:
    """The tables as seen from the R rows of a step; padding reads slot 0."""

    def __init__(self, tables: SlotTables, slots: Tensor, numbers: Tensor) -> None:
        self.tables = tables
        self.present = slots >= 0
        self.slots = slots.clamp(min=0).long()
        self.numbers = numbers

    def column(self, name: str) -> Tensor:
        return self.tables.column(name)[self.slots]


def _biased(raw: Tensor, rows: _Rows) -> Tensor:
    entries = rows.tables.biases[rows.slots]
    codes, values = entries[..., 0], entries[..., 1].contiguous().view(torch.float32)
    active = torch.arange(entries.shape[1], device=raw.device) < rows.column("num_biases")[:, None]
    early = (rows.numbers < rows.column("min_tokens"))[:, None]
    ids = torch.where(codes < 0, -1 - codes, codes)
    values = torch.where(early & (codes < 0), -torch.inf, values)
    return raw.scatter_add(1, torch.where(active, ids, 0).long(), torch.where(active, values, 0.0))


def _penalised(values: Tensor, rows: _Rows) -> Tensor:
    if not rows.tables.counts.numel():
        return values
    counts_rows = rows.column("counts_row")
    codes = rows.tables.counts[counts_rows.clamp(min=0).long()]
    counts = codes >> 1
    repetition, presence, frequency = (
        rows.column(name)[:, None] for name in ("repetition", "presence", "frequency")
    )
    penalised = torch.where(values > 0, values / repetition, values * repetition)
    penalised = penalised - (frequency * counts + presence * (counts > 0))
    return torch.where((counts_rows >= 0)[:, None] & (codes > 0), penalised, values)


def _drawn(relative: Tensor, rows: _Rows, needs: Needs) -> Tensor:
    """[R] tokens by the inverse of the cumulative distribution. `relative` is to the row's largest logit."""
    temperature = rows.column("temperature")
    scaled = (relative / torch.where(temperature > 0, temperature, 1.0)[:, None]).double()
    weights = scaled.exp().masked_fill(scaled < _cuts(scaled, rows, needs)[:, None], 0.0)
    cumulative = weights.cumsum(-1)
    targets = uniform(rows.column("key"), rows.numbers) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)


def _cuts(scaled: Tensor, rows: _Rows, needs: Needs) -> Tensor:
    """[R] the smallest scaled logit that top-k, top-p and min-p keep."""
    cuts = rows.column("log_min_p")
    if not needs.top_k and not needs.top_p:
        return cuts
    top_k, top_p = rows.column("top_k"), rows.column("top_p").double()[:, None]
    ordered = scaled.sort(-1, descending=True).values
    sizes = torch.where(top_k > 0, top_k, scaled.shape[-1]).long()
    kth = ordered.gather(1, sizes[:, None] - 1)
    weights = ordered.exp().masked_fill(ordered < kth, 0.0)
    cumulative = weights.cumsum(-1)
    kept = ((cumulative - weights < top_p * cumulative[:, -1:]) | (top_p >= 1)) & (weights > 0)
    num_kept = kept.sum(-1, keepdim=True).clamp(min=1)
    return torch.maximum(cuts, ordered.gather(1, num_kept - 1).squeeze(1))


def _count_chosen(chosen: Tensor, usable: Tensor, rows: _Rows) -> None:
    counts = rows.tables.counts
    if not counts.numel():
        return
    counts_rows = rows.column("counts_row")
    counted = usable & (counts_rows >= 0)
    places = torch.where(counted, counts_rows.long() * counts.shape[1] + chosen, 0)
    counts.view(-1).scatter_add_(0, places, 2 * counted.to(torch.int32))


def uniform(keys: Tensor, numbers: Tensor) -> Tensor:
    """[R] float64: `batch.uniform` with keys and arithmetic in int64, which wraps around as uint64 does."""
    mixed = keys + (numbers.long() + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-53


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
