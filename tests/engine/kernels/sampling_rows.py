"""Rows of sampling parameters for tests, written straight into the tables, and a comparison with the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.engine.hashing import split_mix
from penstock.engine.sampling import reference
from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from penstock.engine.sampling.tables import ROW, Choose, Filters, SamplingTables, num_words

CPU = torch.device("cpu")
EVERYTHING = Filters()
MAX_BIASES = 64
ULPS = 8
"""Two logarithms and the sums around them are rounded differently: that far apart, two scores may change places."""


@dataclass(frozen=True, kw_only=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    banned: dict[int, float] = field(default_factory=dict)
    """Tokens that may not come before `min_tokens`, with the bias that they have from then on."""
    codes: dict[int, int] = field(default_factory=dict)
    """See SamplingTables.counts."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


def make_tables(rows: Sequence[Row], vocab: int) -> SamplingTables:
    """Seat i has row i."""
    tables = SamplingTables(max(1, len(rows)), vocab, MAX_BIASES, max(1, len(rows)), CPU)
    for seat, row in enumerate(rows):
        packed = np.zeros(1, ROW)
        for name in ("temperature", "top_k", "top_p", "repetition", "presence", "frequency", "min_tokens"):
            packed[name] = getattr(row, name)
        packed["state"] = split_mix(row.seed, 0)
        with np.errstate(divide="ignore"):
            packed["min_p_depth"] = -np.log(np.float64(row.min_p))
        packed["counts_row"] = seat if row.has_penalties else -1
        entries = [(i, v) for i, v in row.bias.items() if i not in row.banned]
        entries += [(-1 - i, v) for i, v in row.banned.items()]
        packed["num_biases"] = len(entries)
        tables.rows[seat] = torch.from_numpy(packed.view(np.uint8))
        for place, (code, value) in enumerate(entries):
            tables.biases[seat, place, 0] = code
            tables.biases[seat, place, 1] = int(np.float32(value).view(np.int32))
        for token_id, code in row.codes.items():
            tables.counts[seat, token_id] = code
    return tables


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(
    choose: Choose,
    logits: Tensor,
    rows: Sequence[Row],
    *,
    numbers: Sequence[int] | None = None,
    filters: Filters = EVERYTHING,
) -> list[int]:
    """One step over all rows."""
    numbers = [0] * len(rows) if numbers is None else numbers
    tables = make_tables(rows, logits.shape[1])
    return choose(logits, tables, ints(range(len(rows))), ints(numbers), filters, None).tolist()


def num_explained(
    found: Tensor,
    expected: Tensor,
    logits: Tensor,
    tables: SamplingTables,
    seats: Tensor,
    numbers: Tensor,
    masks: Tensor | None = None,
) -> int:
    """The rows whose tokens differ; asserts that rounding explains each of them.

    Either the scores of both tokens lie within ULPS of each other, or top-p changed by a millionth keeps another one.

    Args:
        tables: as they were before the step.
    """
    different = (found != expected).nonzero().flatten()
    if not len(different):
        return 0
    views = reference._Rows(tables, seats, numbers)
    processed = reference._penalised(reference._biased(logits.float(), views), views)
    noise = gumbel(hashes(noise_keys(views.column("state"), numbers), logits.shape[1]))
    temperature = views.column("temperature")[:, None]
    scores = processed + temperature * noise
    sizes = torch.maximum(processed.abs(), temperature * noise.abs().clamp(min=1.0))
    for row in different.tolist():
        a, b = int(found[row]), int(expected[row])
        assert min(a, b) >= 0, (row, a, b)
        room = ULPS * 2.0**-23 * float(torch.maximum(sizes[row, a], sizes[row, b]))
        is_near = abs(float(scores[row, a] - scores[row, b])) <= room
        assert is_near or a in _near_top_p(row, logits, tables, seats, numbers, masks), (row, a, b)
    return len(different)


def random_masks(num_rows: int, vocab: int, share: float, seed: int) -> Tensor:
    """[R, words] int32 masks that allow a share of the tokens; bits beyond the vocabulary are anything."""
    bits = np.random.default_rng(seed).random((num_rows, 32 * num_words(vocab))) < share
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def all_allowed(token_ids: Tensor, masks: Tensor) -> bool:
    """Whether masks allow the tokens; -1 is none."""
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return all(token_id < 0 or bits[row, token_id] for row, token_id in enumerate(token_ids.tolist()))


def _near_top_p(
    row: int,
    logits: Tensor,
    tables: SamplingTables,
    seats: Tensor,
    numbers: Tensor,
    masks: Tensor | None,
) -> set[int]:
    top_p = tables.column("top_p")
    kept, counts = top_p.clone(), tables.counts.clone()
    found = set()
    for factor in (1 - 1e-6, 1 + 1e-6):
        top_p.copy_(kept * factor)
        token_ids, _ = reference.choose(logits, tables, seats, numbers, EVERYTHING, masks)
        found.add(int(token_ids[row]))
    top_p.copy_(kept)
    tables.counts.copy_(counts)
    return found
