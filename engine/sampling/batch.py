"""The sampling parameters of one step's R rows as arrays, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]


@dataclass(slots=True)
class SamplingBatch:
    """How to choose one token from each of R rows of logits.

    In this order: the raw log probabilities are noted; `bias` is added; repetition, then frequency and presence
    penalties are applied to the tokens already seen; temperature; top-k; top-p over what top-k left, renormalised;
    min-p relative to the most likely token; then the token is found by inverting the cumulative distribution, in
    order of token id, at `uniform`. Temperature 0 is the first largest logit after the penalties.
    """

    temperature: F32
    top_k: I32
    """0 is off."""
    top_p: F32
    min_p: F32
    uniform: F64
    """[R] in [0, 1): a counter-based random number for (seed, choice, number of the output token)."""
    repetition: F32
    presence: F32
    frequency: F32
    bias_starts: I32
    """[R + 1] row r's biases are entries bias_starts[r] to bias_starts[r + 1] of the two below."""
    bias_ids: I32
    bias_values: F32
    """-inf bans a token."""
    seen_starts: I32
    """[R + 1], as above; a row without penalties has no entries."""
    seen_ids: I32
    seen_counts: I32
    """Times the token is in the output; 0 if only in the prompt (then only repetition applies to it)."""


@dataclass(slots=True)
class SampledRows:
    token_ids: I32
    """[R]; -1 where the row's logits were not finite."""
    logprobs: F32
    """[R] raw log probability of the chosen token (log-softmax of the untouched logits)."""
