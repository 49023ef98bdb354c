"""The parameters by which the tokens of running sequences are chosen: a row for each seat, on the device.

The layout is shared by every implementation of the rule in `reference.py`: plain torch, Triton and C++.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ROW = np.dtype(
    [
        ("state", np.uint64),  # of the SplitMix64 generator of this sequence's noise keys
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p_depth", np.float32),  # -log(min_p), inf without min-p: nats below the most likely token
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),  # 0 is off
        ("min_tokens", np.int32),
        ("num_biases", np.int32),
        ("counts_row", np.int32),  # the row of `counts` that belongs to this seat, -1 without penalties
    ]
)
"""One seat's parameters as they lie in memory."""

_TORCH_DTYPES = {"u8": torch.int64, "f4": torch.float32, "i4": torch.int32}


@dataclass(frozen=True, slots=True)
class Filters:
    """Which work the rows of a step ask for. Work that no row asks for is left out; no token depends on it."""

    top_k: bool = True
    """Some row has top-k."""
    top_p: bool = True
    """Some row has top-p or min-p."""
    sifted: bool = False
    """Some row has a filter of `sieve.py`."""
    marked: bool = False
    """Some row has a watermark; see `marks.py`."""

    @property
    def is_fused(self) -> bool:
        """Whether an implementation of the rule has all that the rows need, without plain torch before it."""
        return not (self.sifted or self.marked)

    @property
    def need_whole_rows(self) -> bool:
        """Whether it takes all logits of a row to know which tokens may win. Otherwise the best of each part do."""
        return self.top_k or self.top_p or not self.is_fused


GRAPH_FILTERS = tuple(Filters(top_k, top_p) for top_k, top_p in product((False, True), repeat=2))
"""The combinations for which a graph is captured."""


class SamplingTables:
    """The parameters of every seat.

    Attributes:
        rows: [num_seats, ROW.itemsize] uint8.
        biases: [num_seats, max_biases, 2] int32: pairs of a token id and the bits of the float32 that is added to its
            logit; an id v that is banned before `min_tokens` stands as -1 - v. No id stands twice in a seat.
        counts: [max_penalised, vocab] int32: twice the times that a token is in the output, plus 1 if it is in the
            prompt and repetition is penalised; 0 is a token that no penalty applies to.
    """

    def __init__(
        self, num_seats: int, vocab_size: int, max_biases: int, max_penalised: int, device: torch.device
    ) -> None:
        self.vocab_size = vocab_size
        self.rows = torch.zeros(num_seats, ROW.itemsize, dtype=torch.uint8, device=device)
        self.biases = torch.zeros(num_seats, max_biases, 2, dtype=torch.int32, device=device)
        self.counts = _zeros(max_penalised, vocab_size, device)
        self._by_dtype = {dtype: self.rows.view(dtype) for dtype in _TORCH_DTYPES.values()}
        self.column("counts_row").fill_(-1)

    def column(self, name: str) -> Tensor:
        """[num_seats] one field of ROW; `state` as int64."""
        field, offset = ROW.fields[name][:2]  # type: ignore[index]
        return self._by_dtype[_TORCH_DTYPES[field.str[1:]]][:, offset // field.itemsize]

    def view(self, dtype: torch.dtype) -> Tensor:
        """`rows` read as int64, float32 or int32."""
        return self._by_dtype[dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the vocabulary that one of several ranks has the logits of; each has as many columns."""

    first: int
    """The token of the first column. Columns beyond the vocabulary are padding; there is at least one token."""
    gather: Callable[[Tensor], Tensor]
    """Puts the ranks' rows together, [R, n] on each -> [R, ranks * n], in the order of their parts."""


class Choose(Protocol):
    """An implementation of the rule; see `reference.choose`."""

    def __call__(
        self,
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        part: Part | None = None,
        /,
    ) -> Tensor: ...


MostLikely = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Finds the most likely tokens of rows of logits; see `reference.most_likely`."""


def num_words(vocab_size: int) -> int:
    """The int32 words of a mask that has a bit for every token."""
    return -(-vocab_size // 32)


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows, columns] int32 zeros; on a CPU the pages take memory only once they are touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, columns), np.int32))
    return torch.zeros(rows, columns, dtype=torch.int32, device=device)
