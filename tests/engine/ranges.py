"""Between which numbers a computed result must lie: bounds that follow from the arithmetic, not from one processor.

Every function here is an operation of the decoder in float64 on ranges. What enters it is known exactly; each step
widens the ranges by what rounding can do in it, whatever the order of summation and whether or not products are fused
(Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). A rounding to a narrower type rounds both ends, so
that a result that was rounded once too often, or not at all, is nearly always outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-24
"""The unit roundoff of float32, in which sums are accumulated."""
FUNCTION = 4
"""Unit roundoffs that exp, tanh or rsqrt of one argument may be off; CUDA, SLEEF and libm promise 1 to 4."""
_SPAN = 128
_TINY = torch.finfo(torch.float32).tiny
"""The largest loss where a result is subnormal."""


@dataclass(frozen=True, slots=True)
class Range:
    """Two float64 tensors; what is computed lies between them, element by element."""

    low: Tensor
    high: Tensor

    def __getitem__(self, places: object) -> Range:
        return Range(self.low[places], self.high[places])  # type: ignore[index]

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high).widened(UNIT)

    def __sub__(self, other: Range) -> Range:
        return Range(self.low - other.high, self.high - other.low).widened(UNIT)

    def __mul__(self, other: Range) -> Range:
        ends = torch.stack([a * b for a in (self.low, self.high) for b in (other.low, other.high)])
        return Range(ends.amin(0), ends.amax(0)).widened(UNIT)

    @property
    def mT(self) -> Range:
        return Range(self.low.mT, self.high.mT)

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def radius(self) -> Tensor:
        return (self.high - self.low) / 2

    def widened(self, relative: float | Tensor, absolute: float | Tensor = 0.0) -> Range:
        """The range after an error relative to the result, and one that is not."""
        error = relative * torch.maximum(self.low.abs(), self.high.abs()) + absolute + _TINY
        return Range(self.low - error, self.high + error)

    def rounded(self, dtype: torch.dtype) -> Range:
        return Range(self.low.to(dtype).double(), self.high.to(dtype).double())

    def masked(self, hidden: Tensor) -> Range:
        """-inf where it is hidden."""
        return Range(self.low.masked_fill(hidden, -torch.inf), self.high.masked_fill(hidden, -torch.inf))

    def scaled(self, factor: float) -> Range:
        """The product with a positive number that has been rounded itself."""
        return Range(self.low * factor, self.high * factor).widened(2 * UNIT)


def exactly(tensor: Tensor) -> Range:
    return Range(tensor.double(), tensor.double())


def concatenated(ranges: Sequence[Range], dim: int) -> Range:
    return Range(
        torch.cat([each.low for each in ranges], dim), torch.cat([each.high for each in ranges], dim)
    )


def gamma(roundings: int, unit: float = UNIT) -> float:
    """The relative error that so many roundings, one after another, can bring."""
    return roundings * unit / (1 - roundings * unit)


def dot(a: Range, b: Range, unit: float = UNIT) -> Range:
    """a [..., m, k] @ b [..., k, n], added up in any order."""
    middle = a.middle @ b.middle
    spread = a.middle.abs() @ b.radius + a.radius @ (b.middle.abs() + b.radius)
    largest = (a.middle.abs() + a.radius) @ (b.middle.abs() + b.radius)
    error = spread + gamma(a.low.shape[-1], unit) * largest
    return Range(middle - error, middle + error).widened(0)


def linear(x: Range, weight: Tensor, bias: Tensor | None = None) -> Range:
    product = dot(x, exactly(weight).mT)
    return product if bias is None else product + exactly(bias)


def rms_norm(x: Range, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Range:
    """`reference.rms_norm` of what has that dtype."""
    square = x.middle.square().mean(-1, keepdim=True) + eps
    # A small change of x changes its norm by as much, relatively; of the square root's argument half of it is left.
    spread = x.radius.square().mean(-1, keepdim=True).sqrt() / square.sqrt()
    relative = gamma(x.low.shape[-1] // 2 + FUNCTION + 4) + spread / (1 - spread).clamp(min=0.5)
    scale = square.rsqrt()
    normed = Range(x.low * scale, x.high * scale).widened(relative).rounded(dtype)
    return (normed * exactly(weight)).rounded(dtype)


def silu_mul(gate: Range, up: Range, dtype: torch.dtype = torch.float32) -> Range:
    """`reference.glu` with silu, of what has that dtype; silu falls left of its minimum at -1.278, and rises beyond."""
    ends = [end * torch.sigmoid(end) for end in (gate.low, gate.high)]
    holds_minimum = (gate.low < -1.2784645) & (gate.high > -1.2784645)
    low = torch.minimum(*ends).where(~holds_minimum, ends[0].new_tensor(-0.2784646))
    lost = gate.low.abs() * math.exp(-87.3)  # from there on exp may be 0
    # An exponential may be a power of 2, whose argument is rounded: that counts where the exponential does.
    relative = gamma(FUNCTION + 5) + 2 * UNIT * gate.low.abs() * torch.sigmoid(-gate.low)
    silu = Range(low, torch.maximum(*ends)).widened(relative, lost).rounded(dtype)
    return (silu * up).rounded(dtype)


def rotary(x: Range, cos: Tensor, sin: Tensor, dtype: torch.dtype = torch.float32) -> Range:
    """`reference.rotary` of what has that dtype: x [T, heads, d], cos and sin [T, d / 2] float32."""
    half = x.low.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turn, cross = (exactly(table.to(dtype).unsqueeze(1)) for table in (cos, sin))

    def times(a: Range, b: Range) -> Range:
        return (a * b).rounded(dtype)

    parts = (times(first, turn) - times(second, cross)), (times(second, turn) + times(first, cross))
    return concatenated(parts, -1).rounded(dtype)


def attend(
    scores: Range,
    values: Range,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> Range:
    """softmax(scores [m, n]) @ values [n, d]; a score that is not seen is -inf at both ends.

    The softmax may be computed tile by tile, from 16 keys on, and what was summed up is scaled whenever a tile brings a
    larger score. Weights are rounded to `weights_dtype`, or else `dtype`, before they are multiplied with the values,
    and the result to `dtype`. With the scales [n] of values, weights times these become integers of 16 bits, and
    the largest is 32,767 in every span of 128 keys.
    """
    seen = scores.low.isfinite()
    largest = scores.middle.abs().where(seen, 0.0).amax(-1, keepdim=True)
    shift = scores.radius.where(seen, 0.0) + 4 * UNIT * largest
    roundings = scores.low.shape[-1] + (FUNCTION + 1) * (math.ceil(scores.low.shape[-1] / 16) + 2)
    relative = torch.expm1(shift) + gamma(roundings)
    weights_dtype = weights_dtype or dtype
    narrow = weights_dtype != torch.float32
    stored = relative + narrow * torch.finfo(weights_dtype).eps / 2
    weights = scores.middle.masked_fill(~seen, -torch.inf).softmax(-1)
    above = (weights * stored) @ values.middle.abs() + (weights * (1 + stored)) @ values.radius
    smallest = torch.finfo(weights_dtype).tiny * torch.finfo(weights_dtype).eps
    above = above + narrow * smallest * values.middle.abs().sum(-2)
    if scales is not None:
        scaled = weights * (1 + stored) * scales
        padded = torch.nn.functional.pad(scaled, (0, -scaled.shape[-1] % _SPAN))
        spans = padded.view(*padded.shape[:-1], -1, _SPAN)
        steps = (
            (spans.amax(-1, keepdim=True) / (2**15 - 1)).expand_as(spans).flatten(-2)[..., : scaled.shape[-1]]
        )
        integers = ((values.middle.abs() + values.radius) / scales[:, None]).nan_to_num(0.0)
        above = above + (steps * seen) @ integers * (0.5 + 2**15 * 3 * UNIT)
    below = (weights * relative).sum(-1, keepdim=True)
    result = weights @ values.middle
    error = (above + result.abs() * below) / (1 - below)
    return Range(result - error, result + error).widened(2 * UNIT).rounded(dtype)


def with_sinks(scores: Range, values: Range, sinks: Tensor | None) -> tuple[Range, Range]:
    """Scores [..., keys] and values [keys, d], and a last key with the score of a sink, and a value of 0."""
    if sinks is None:
        return scores, values
    of_rows = exactly(sinks.expand(*scores.low.shape[:-1], 1))
    nothing = exactly(values.low.new_zeros(1, values.low.shape[1]))
    return concatenated([scores, of_rows], -1), concatenated([values, nothing], 0)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    first: int = 0,
) -> Range:
    """Attends from queries [n, num_heads, d] of the last n tokens to keys and values [context, num_kv_heads, d].

    Args:
        sinks: [num_heads]
        first: the first position that others see.

    Returns:
        [n, num_heads * d], rounded to the queries' dtype.
    """
    (num_queries, _, head_dim), (context, num_kv_heads, _) = queries.shape, keys.shape
    places = torch.arange(context, device=keys.device)
    positions = places[context - num_queries :, None]
    hidden = (places > positions) | (places <= positions - (window if window > 0 else context))
    if window < 0:
        hidden |= places < positions // -window * -window
    hidden |= (places < first) & (places != positions)
    groups = []
    for head in range(num_kv_heads):
        group = queries.reshape(num_queries, num_kv_heads, -1, head_dim)[:, head].transpose(0, 1)
        scores = dot(exactly(group), exactly(keys[:, head]).mT).scaled(head_dim**-0.5)
        of_group = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)[head]
        seen = with_sinks(scores.masked(hidden), exactly(values[:, head]), of_group)
        groups.append(attend(*seen, queries.dtype))
    attended = concatenated(groups, 0)
    return Range(attended.low.transpose(0, 1).flatten(1), attended.high.transpose(0, 1).flatten(1))


def log_softmax(logits: Tensor) -> Range:
    """The log probabilities of rows of logits [..., n]; -inf is a logit that has none.

    They are differences of a logit, the largest, and the logarithm of a sum of exponentials, or of a logit and the sum
    of the other two. What is off in the argument of an exponential counts as much as that term does in the sum.
    """
    wide = logits.double()
    top = wide.amax(-1, keepdim=True)
    shifted = wide - top
    depth = shifted.abs().masked_fill(shifted.isinf(), 0)
    total = shifted.logsumexp(-1, keepdim=True)
    of_sum = gamma(logits.shape[-1] + FUNCTION) + 2 * UNIT * (shifted.softmax(-1) * depth).sum(
        -1, keepdim=True
    )
    error = of_sum + UNIT * (
        (FUNCTION + 2) * total.abs() + 2 * depth + top.abs() + wide.masked_fill(wide.isinf(), 0).abs()
    )
    return Range(shifted - total - error, shifted - total + error)


def assert_logprobs(found: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """They are the log probabilities of tokens [R] under rows of logits [R, n], and NaN where there is no token."""
    known = token_ids >= 0
    assert found[~known].isnan().all()
    places = token_ids[known, None].long()
    expected = log_softmax(logits[known])
    chosen = Range(expected.low.gather(1, places)[:, 0], expected.high.gather(1, places)[:, 0])
    assert_within(found[known], chosen, "log probability")


def assert_within(found: Tensor, expected: Range, what: str = "result") -> None:
    """No element is outside its range."""
    number = found.double().to(expected.low.device)
    assert number.shape == expected.low.shape
    assert number.isfinite().all(), f"the {what} is not finite"
    outside = torch.maximum(expected.low - number, number - expected.high)
    if (outside > 0).any():
        place = int(outside.argmax())
        low, value, high = (float(t.flatten()[place]) for t in (expected.low, number, expected.high))
        raise AssertionError(
            f"the {what} has {value!r} at {place}, which is not between {low!r} and {high!r}"
        )
