"""Sampler: keeps the sampling parameters of the running sequences on the device, a row for each seat.

A sequence's row is written once, when it gets its seat, by copies that the host does not wait for. A step then needs
nothing from the host but which seats it samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.hashing import split_mix
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Masks
from penstock.engine.sampling.marks import Marks
from penstock.engine.sampling.sieve import Sieve
from penstock.engine.sampling.tables import ROW, Choose, Filters, SamplingTables, num_words

MAX_TOP_LOGPROBS = 20
_NOTHING = Filters(top_k=False, top_p=False)


class Sampler:
    """Owns the sampling tables. All calls come from one thread, and their work is in the order of one stream.

    Args:
        choose: turns logits into tokens; see `reference.choose`.
        max_biases: biased and banned tokens of one request; a request with more is refused.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device,
        choose: Choose,
        *,
        max_biases: int = 1152,
    ) -> None:
        self.vocab_size = vocab_size
        self.tables = SamplingTables(num_seats, vocab_size, max_biases, num_seats, device)
        self._device = device
        self._max_biases = max_biases
        self._eos_token_ids = frozenset(eos_token_ids)
        self._choose = choose
        self._sieve = Sieve(num_seats, device)
        self._marks = Marks(num_seats, device)
        self._filters: dict[int, Filters] = {}
        """The filters of the sequence in each seat."""

    def assign(self, seat: int, sequence: Sequence) -> None:
        """Writes all parameters of a sequence into its seat, in place of the seat's former ones.

        Raises:
            ValueError: the request has more biased and banned tokens than there is room for.
        """
        params = sequence.request.sampling
        biases = self._biases(params)
        if len(biases) > self._max_biases:
            raise ValueError(f"{len(biases)} tokens with a bias or a ban; {self._max_biases} are the most")
        row = np.zeros(1, ROW)
        row["state"] = split_mix(params.seed, sequence.index)
        row["temperature"], row["min_tokens"] = params.temperature, params.min_tokens
        with np.errstate(divide="ignore"):
            min_p_depth = float(-np.log(np.float64(params.min_p)))
        top_k = min(params.top_k, self.vocab_size)
        sifted = self._sieve.assign(seat, params, top_k, min_p_depth)
        row["top_k"], row["top_p"], row["min_p_depth"] = (
            (0, 1.0, np.inf) if sifted else (top_k, params.top_p, min_p_depth)
        )
        row["repetition"], row["presence"] = params.repetition_penalty, params.presence_penalty
        row["frequency"] = params.frequency_penalty
        row["num_biases"] = len(biases)
        row["counts_row"] = seat if has_penalties(params) else -1
        is_drawn = params.temperature > 0 and not sifted
        self._filters[seat] = Filters(
            top_k=is_drawn and 0 < params.top_k < self.vocab_size,
            top_p=is_drawn and (params.top_p < 1 or params.min_p > 0),
            sifted=sifted,
            marked=self._marks.assign(seat, params.watermark),
        )
        if has_penalties(params):
            self._count(seat, sequence)
        if len(biases):
            self.tables.biases[seat, : len(biases)].copy_(self._staged(biases), non_blocking=True)
        self.tables.rows[seat].copy_(self._staged(row.view(np.uint8)), non_blocking=True)

    def release(self, seat: int) -> None:
        """Forgets the seat's sequence. A step in flight may still sample it; none that is launched later may."""
        self._filters.pop(seat, None)

    def filters(self, seats: Iterable[int]) -> Filters:
        """Returns at least the filters of a step over these seats; a seat of no sequence, or -1, has none."""
        asked = [self._filters.get(seat, _NOTHING) for seat in seats]
        return Filters(
            top_k=any(filters.top_k for filters in asked),
            top_p=any(filters.top_p for filters in asked),
            sifted=any(filters.sifted for filters in asked),
            marked=any(filters.marked for filters in asked),
        )

    def sample(
        self,
        logits: Tensor,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Chooses a token for each row of logits; see `reference.choose`.

        Args:
            filters: at least the seats' filters.
            previous: [R] int32, the token before the one that a row chooses; needed if `filters.marked`.
        """
        if filters.marked:
            assert previous is not None
            logits = self._marks.marked(logits, seats, previous)
        if filters.sifted:
            masks = self._sieve.masks(logits, self.tables, seats, numbers, masks)
        return self._choose(logits, self.tables, seats, numbers, filters, masks)

    def masks(self, masks: Masks, order: ListLike[tuple[int, int]]) -> Tensor:
        """[R, words] int32: the masks of rows, each given by its chunk and how many of its drafts come before."""
        given = np.frombuffer(masks.bits, np.int32).reshape(-1, masks.num_words)
        rows = np.full((len(order), num_words(self.vocab_size)), -1, np.int32)
        places = [place for place, (chunk, _) in enumerate(order) if masks.first[chunk] >= 0]
        sources = [masks.first[order[place][0]] + order[place][1] for place in places]
        num_given = min(masks.num_words, rows.shape[1])
        rows[places] = 0
        rows[places, :num_given] = given[sources, :num_given]
        return self._staged(rows).to(self._device, non_blocking=True)

    def _biases(self, params: SamplingParams) -> NDArray[np.int32]:
        """[n, 2] as in SamplingTables.biases."""
        ending = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos_token_ids
        is_banned = params.min_tokens > 0 and not params.is_guided  # masks hold the end back
        banned = ending if is_banned else frozenset()
        ids = sorted(i for i in banned | params.logit_bias.keys() if 0 <= i < self.vocab_size)
        entries = np.zeros((len(ids), 2), np.int32)
        entries[:, 0] = [-1 - i if i in banned else i for i in ids]
        entries[:, 1] = np.array([params.logit_bias.get(i, 0.0) for i in ids], np.float32).view(np.int32)
        return entries

    def _count(self, seat: int, sequence: Sequence) -> None:
        """Fills the seat's row of counts with the sequence's tokens."""
        num_prompt, token_ids = sequence.num_prompt_tokens, np.array(sequence.token_ids, np.int64)
        codes = 2 * np.bincount(token_ids[num_prompt:], minlength=self.vocab_size)
        if sequence.request.sampling.repetition_penalty != 1:
            codes[token_ids[:num_prompt]] |= 1
        self.tables.counts[seat].copy_(self._staged(codes.astype(np.int32)), non_blocking=True)

    def _staged(self, array: NDArray[np.generic]) -> Tensor:
        """A tensor whose copy to the device the host need not wait for: torch keeps its pinned memory until then."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory()


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
