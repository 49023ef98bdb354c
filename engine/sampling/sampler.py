"""Chooses tokens from logits: plain torch, on any device. `SamplingBatch` says what is computed, in which order.

Every row is computed for itself, so its token does not depend on the rows around it. What ties with a token that top-k
or top-p keeps is kept as well: the cut is a value, not a rank.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sampling.batch import I32, SampledRows, SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch) -> SampledRows:
    """One token for each row.

    Args:
        logits: [R, vocab] float32; not changed.
    """
    finite = logits.isfinite().all(-1)
    processed = _processed(logits, batch)
    chosen = processed.argmax(-1)
    drawing = np.flatnonzero(batch.temperature > 0).astype(np.int32)
    if drawing.size:
        rows = torch.from_numpy(drawing).to(logits.device)
        chosen[rows] = _draw(processed[rows], batch, drawing)
    finite &= processed.amax(-1) > -torch.inf
    token_ids = torch.where(finite, chosen, -1).to(torch.int32)
    logprobs = _logprobs(logits, chosen) if batch.wants_logprobs else torch.full(chosen.shape, torch.nan)
    return SampledRows(token_ids.cpu().numpy(), logprobs.cpu().numpy())


def top_logprobs(logits: Tensor, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` most likely tokens of one row [vocab] with their raw log probabilities, best first."""
    if num == 0:
        return ()
    values, token_ids = torch.log_softmax(logits, -1).topk(min(num, logits.numel()))
    return tuple(zip(token_ids.tolist(), values.tolist(), strict=True))


def _logprobs(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(1, chosen[:, None]).squeeze(1)


def _processed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Logits with biases and penalties; the same tensor if there are none."""
    if not batch.bias_ids.size and not batch.seen_ids.size:
        return logits
    processed = logits.clone()
    if batch.bias_ids.size:
        rows, ids = _indices(batch.bias_starts, batch.bias_ids, logits.device)
        processed.index_put_((rows, ids), _to(batch.bias_values, logits.device), accumulate=True)
    if batch.seen_ids.size:
        _penalise(processed, batch)
    return processed


def _penalise(processed: Tensor, batch: SamplingBatch) -> None:
    device = processed.device
    rows, ids = _indices(batch.seen_starts, batch.seen_ids, device)
    counts = _to(batch.seen_counts, device)
    values = processed[rows, ids]
    repetition = _to(batch.repetition, device)[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= _to(batch.frequency, device)[rows] * counts + _to(batch.presence, device)[rows] * (counts > 0)
    processed[rows, ids] = values


def _draw(logits: Tensor, batch: SamplingBatch, rows: I32) -> Tensor:
    """[D, vocab] -> [D] the token of each row, at its `uniform`."""
    device = logits.device
    relative = logits - logits.amax(-1, keepdim=True)  # before the division, which may overflow
    scaled = (relative / _to(batch.temperature[rows], device)[:, None]).double()
    weights = scaled.exp()
    weights = weights.masked_fill(scaled < _cuts(scaled, batch, rows)[:, None], 0.0)
    cumulative = weights.cumsum(-1)
    targets = _to(batch.uniform[rows], device) * cumulative[:, -1]
    chosen = torch.searchsorted(cumulative, targets[:, None], right=True).squeeze(1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(chosen, last)


def _cuts(scaled: Tensor, batch: SamplingBatch, rows: I32) -> Tensor:
    """[D] the smallest logit that top-k, top-p and min-p keep. `scaled` is relative to the row's largest."""
    device = scaled.device
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows].astype(np.float64)
    with np.errstate(divide="ignore"):
        cuts = _to(np.log(min_p), device)
    sorting = np.flatnonzero((top_k > 0) | (top_p < 1))
    if sorting.size:
        at = torch.from_numpy(sorting).to(device)
        ordered = scaled[at].sort(-1, descending=True).values
        by_rank = _rank_cuts(ordered, _to(top_k[sorting], device), _to(top_p[sorting], device))
        cuts[at] = torch.maximum(cuts[at], by_rank)
    return cuts


def _rank_cuts(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[D] the last of the most likely that top-k keeps and whose predecessors have less than top_p of what it keeps."""
    vocab = ordered.shape[-1]
    sizes = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long()
    kth = ordered.gather(1, sizes[:, None] - 1)
    weights = ordered.exp().masked_fill(ordered < kth, 0.0)
    cumulative = weights.cumsum(-1)
    before = cumulative - weights
    kept = (before < top_p.double()[:, None] * cumulative[:, -1:]) & (weights > 0)
    num_kept = kept.sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, num_kept - 1).squeeze(1)


def _indices(starts: I32, ids: I32, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    return _to(rows, device), _to(ids.astype(np.int64), device)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
