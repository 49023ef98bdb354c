"""Rarely used filters: typical-p, top-a and XTC, in plain torch, as masks for any implementation.

A row with one of them is chosen from a mask in which all of its filters are; its parameters in the sampling tables have
none. From the tokens that top-k, top-p and min-p keep (see `reference.py`), with the probabilities p of the tokens left
at each point:

1. Typical-p keeps the tokens whose -log p is nearest to the entropy, until they have typical_p of the mass: Meister,
   Pimentel, Wiher and Cotterell, "Locally typical sampling", 2023.
2. Top-a keeps tokens with p >= top_a * (the largest p)^2.
3. XTC ("exclude top choices") takes away, with xtc_probability, all tokens with p >= xtc_threshold but the least likely
   of them. Whether it does is a function of the seed and of the token's number, as the noise is.

A row's mask is computed as if it were alone on a CPU, so that it does not depend on the rows around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.planning.params import SamplingParams
from penstock.engine.sampling.noise import noise_keys
from penstock.engine.sampling.reference import kept, processed
from penstock.engine.sampling.tables import Filters, SamplingTables

_COLUMNS = ("top_k", "top_p", "min_p_depth", "typical_p", "top_a", "xtc_probability", "xtc_threshold")
_FREE = (0, 1.0, torch.inf, 1.0, 0.0, 0.0, 1.0)
_ALL = Filters()


class Sieve:
    """The filters of the sequences in all seats, on the device."""

    def __init__(self, num_seats: int, device: torch.device) -> None:
        self._rows = torch.tensor(_FREE).repeat(num_seats, 1).to(device)
        self._seats: set[int] = set()
        """The seats whose sequences have one of these filters."""

    def assign(self, seat: int, params: SamplingParams, top_k: int, min_p_depth: float) -> bool:
        """Takes the filters of the sequence that gets a seat, if it has one of these; says whether it has."""
        if not is_sifted(params):
            if seat in self._seats:
                self._seats.remove(seat)
                self._rows[seat].copy_(torch.tensor(_FREE))
            return False
        others = (params.typical_p, params.top_a, params.xtc_probability, params.xtc_threshold)
        self._rows[seat].copy_(torch.tensor((top_k, params.top_p, min_p_depth, *others)))
        self._seats.add(seat)
        return True

    def masks(
        self, logits: Tensor, tables: SamplingTables, seats: Tensor, numbers: Tensor, masks: Tensor | None
    ) -> Tensor:
        """Returns [R, words] int32, the tokens of its mask that each row's filters keep; arguments as in `choose`."""
        if logits.device.type != "cpu":
            return self._kept(logits, tables, seats, numbers, masks)
        words = -(-logits.shape[1] // 32)
        found = torch.full((len(seats), words), -1, dtype=torch.int32) if masks is None else masks.clone()
        for i, seat in enumerate(seats.tolist()):
            if seat in self._seats:
                row = slice(i, i + 1)
                of_row = None if masks is None else masks[row]
                found[row] = self._kept(logits[row], tables, seats[row], numbers[row], of_row)
        return found

    def _kept(
        self, logits: Tensor, tables: SamplingTables, seats: Tensor, numbers: Tensor, masks: Tensor | None
    ) -> Tensor:
        places = seats.clamp(min=0).long()
        column = dict(zip(_COLUMNS, self._rows[places].unbind(1), strict=True))
        column["temperature"] = tables.column("temperature")[places]
        values = processed(logits.float(), tables, seats, numbers, masks)
        depths = values.amax(-1, keepdim=True) - values
        weights = torch.exp(-depths.double() / column["temperature"].double().clamp(min=1e-30)[:, None])
        weights = torch.where(kept(depths, column, _ALL) & values.isfinite(), weights, 0.0)
        weights = _typical(weights, column["typical_p"][:, None])
        weights = _top_a(weights, column["top_a"][:, None])
        keys = noise_keys(noise_keys(tables.column("state")[places], numbers), torch.zeros_like(numbers))
        chance = ((keys >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
        is_due = chance < column["xtc_probability"]
        return _packed(_without_top(weights, column["xtc_threshold"][:, None], is_due[:, None]) > 0)


def is_sifted(params: SamplingParams) -> bool:
    """Returns whether a request asks for one of these filters, which do not matter at temperature 0."""
    return params.temperature > 0 and (params.typical_p < 1 or params.top_a > 0 or params.xtc_probability > 0)


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    shares = _shares(weights)
    surprise = -torch.where(shares > 0, shares, 1.0).log()
    entropy = (shares * surprise).sum(-1, keepdim=True)
    distance = torch.where(shares > 0, (surprise - entropy).abs(), torch.inf)
    order = distance.argsort(dim=-1, stable=True)
    before = shares.gather(1, order).cumsum(-1) - shares.gather(1, order)
    is_in = torch.zeros_like(shares, dtype=torch.bool).scatter(1, order, before < typical_p)
    return torch.where(is_in | (typical_p >= 1), weights, 0.0)


def _top_a(weights: Tensor, top_a: Tensor) -> Tensor:
    shares = _shares(weights)
    return torch.where(shares >= top_a * shares.amax(-1, keepdim=True) ** 2, weights, 0.0)


def _without_top(weights: Tensor, threshold: Tensor, is_due: Tensor) -> Tensor:
    shares = _shares(weights)
    is_top = (shares >= threshold) & (shares > 0)
    least = torch.where(is_top, shares, torch.inf).argmin(-1, keepdim=True)
    is_spared = torch.zeros_like(is_top).scatter(1, least, True)
    return torch.where(is_due & is_top & ~is_spared, 0.0, weights)


def _packed(bits: Tensor) -> Tensor:
    """[R, words] int32 of [R, vocab] bool."""
    num_words = -(-bits.shape[1] // 32)
    padded = torch.nn.functional.pad(bits, (0, 32 * num_words - bits.shape[1])).view(len(bits), num_words, 32)
    values = padded.long() << torch.arange(32, device=bits.device)
    return values.sum(-1).to(torch.int32)
