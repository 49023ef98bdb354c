"""How far a whole decoder's logits may be off: what rounding errors of every operation, drawn at random, do to them.

Bounds of single operations (see `ranges`) multiply from layer to layer, and soon allow anything. Here the reference
runs a few times with each result moved as far as its roundings move it, and what comes out differs as much as two
honest implementations do: errors of that size are as many and as independent as the drawn ones. Of a normal
distribution the largest of some thousand values is above 3.3 deviations, and none in 10^10 is above twice that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.kernels.batch import Batch, blank_batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Attend, Kernels, reference_kernels
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.model.parse import read_config
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.weights import load_weights
from penstock.engine.planning.request import TokenLogprobs
from penstock.engine.program.decoders import make_decoder
from penstock.engine.quant.formats import Format, NamedTensors
from tests.engine.configs import spread
from tests.engine.ranges import FUNCTION, UNIT

RUNS, MARGIN = 3, 2
Decode = Callable[[Batch], Tensor]


@dataclass
class NoisyReference:
    """The reference's operations, each result moved by its roundings.

    Attributes:
        unit: of the dtype in which activations are kept.
        kv_dtype: that in which keys and values are; int8 with a scale for every head of a token, uint8 for numbers of
            4 bits.
        read_as: the dtype to which linear maps round what they are given; int8 with a scale for every row.
        attends_in: the dtype to which attention rounds queries and weights.
    """

    unit: float
    kv_dtype: torch.dtype
    read_as: torch.dtype
    attends_in: torch.dtype
    generator: torch.Generator

    def kernels(self) -> Kernels:
        self.reference = reference_kernels(torch.device("cpu"), torch.float32)
        return replace(
            self.reference,
            linear=self.linear,
            rms_norm=self.rms_norm,
            add_rms_norm=self.add_rms_norm,
            layer_norm=lambda *of: self.moved(self.reference.layer_norm(*of), 2, of[0].shape[-1]),
            glu=lambda gate_up, activation: self.moved(self.reference.glu(gate_up, activation), 2, FUNCTION),
            rotate_and_write=self.rotate_and_write,
            attention=self.attention,
        )

    def moved(self, x: Tensor, roundings: int, length: float = 1.0, unit: float | None = None) -> Tensor:
        """A result after so many roundings in its dtype, and after sums of that length in float32.

        Roundings, and those within a sum, are independent: their error grows with the root of their number. That of a
        sum is relative to what is added up, which is as large in an element that comes out small as in the others.
        """
        rounded = math.sqrt(roundings) * (self.unit if unit is None else unit) * x.abs()
        summed = math.sqrt(length) * UNIT * x.square().mean(-1, keepdim=True).sqrt()
        return x + (rounded + summed) * (2 * torch.rand(x.shape, generator=self.generator) - 1)

    def stored(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds x to a dtype; int8 has a scale for every row, and so has uint8, which stands for 4 bits, at most."""
        steps = {torch.int8: 254, torch.uint8: 14}.get(dtype)
        step = x.abs().amax(-1, keepdim=True) / steps if steps else unit_of(dtype) * x.abs()
        return x + step * (2 * torch.rand(x.shape, generator=self.generator) - 1)

    def read(self, x: Tensor) -> Tensor:
        """Rounds activations as a linear map reads them."""
        return x if self.read_as == torch.float32 else self.stored(x, self.read_as)

    def linear(
        self, tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False
    ) -> Linear:
        return _NoisyLinear(self, self.reference.linear(tensors, format, bias, gated=gated))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.moved(self.reference.rms_norm(x, weight, eps), 3, x.shape[-1])

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = self.moved(hidden + delta, 1)
        return total, self.rms_norm(total, weight, eps)

    def rotate_and_write(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        places: TokenPlaces,
        layer_kv: Tensor | None,
        shape: KVShape,
        **norms: bool,
    ) -> Tensor:
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        asked = heads.shape[1] - (0 if layer_kv is None else 2 * shape.num_kv_heads)
        keys_and_values = self.moved(self.stored(heads[:, asked:], self.kv_dtype), 0)
        moved = torch.cat((heads[:, :asked], keys_and_values), 1)
        queries = self.reference.rotate_and_write(
            moved.flatten(1), q_norm, k_norm, eps, places, layer_kv, shape, **norms
        )
        return self.moved(queries, 4)

    def attention(self, batch: Batch, shape: KVShape) -> Attend:
        attend, context = self.reference.attention(batch, shape), int(batch.context_lens.max())

        def attention(
            queries: Tensor,
            layer_kv: Tensor,
            window: int,
            scale: float | None = None,
            softcap: float = 0.0,
            block_tables: Tensor | None = None,
            sinks: Tensor | None = None,
            first: int = 0,
        ) -> Tensor:
            more = scale, softcap, block_tables, sinks, first
            if self.attends_in == torch.float32:
                attended = attend(queries, layer_kv, window, *more)
                return self.moved(attended, 2, context + shape.head_dim)
            attended = attend(self.stored(queries, self.attends_in), layer_kv, window, *more)
            # What rounded weights do is relative to what they add up, as with a sum.
            length = context + shape.head_dim + (unit_of(self.attends_in) / UNIT) ** 2
            return self.moved(attended, 2, length)

        return attention


@dataclass
class _NoisyLinear:
    noisy: NoisyReference
    product: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.noisy.moved(self.product(self.noisy.read(x)), 2, x.shape[-1])


def unit_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def allowed(
    decoder: Callable[[Kernels], Decode],
    steps: Iterable[Batch],
    kv_dtype: torch.dtype,
    dtype: torch.dtype = torch.float32,
    read_as: torch.dtype = torch.float32,
    attends_in: torch.dtype = torch.float32,
) -> list[float]:
    """For each step, how far the worst of its logits may be off.

    Args:
        decoder: makes one over a kernel table.
        dtype: of activations.
        read_as, attends_in: see NoisyReference.
    """
    steps, plain = list(steps), decoder(reference_kernels(torch.device("cpu"), torch.float32))
    expected, worst = [plain(step) for step in steps], [0.0] * len(steps)
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)
        noisy = NoisyReference(unit_of(dtype), kv_dtype, read_as, attends_in, generator)
        decode = decoder(noisy.kernels())
        for i, step in enumerate(steps):
            worst[i] = max(worst[i], largest(decode(step) - expected[i]))
    return [MARGIN * each for each in worst]


def error_of(
    path: Path,
    token_ids: Ids[int],
    kv_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    hidden: bool = False,
) -> float:
    """Returns how far the logits of two decoders may be apart, if each is as far off as its roundings bring it.

    Args:
        hidden: of the last hidden states, not of the logits.
    """
    config = read_config(path)
    kv = KVCache(KVLayout.of(config, 8), 256, torch.float32, torch.device("cpu"))
    length = len(token_ids)
    batch = blank_batch([length], [length], torch.arange(-(-length // 8), dtype=torch.int32)[None])
    batch.token_ids, batch.sample_rows = torch.tensor(token_ids), torch.arange(length)

    def make(kernels: Kernels) -> Decode:
        weights = load_weights(config, TensorFiles(path), kernels, lambda *_: None)
        decoder = make_decoder(config, weights, kernels, kv, 512)
        return decoder if hidden else lambda batch: weights.lm_head(decoder(batch))

    with torch.inference_mode():
        return 2 * allowed(make, [spread(batch, kv.layout)], kv_dtype, dtype)[0]


def check_logprobs(found: TokenLogprobs, logits: Tensor, error: float) -> None:
    """Checks the most likely tokens' log probabilities, which logits that are off by `error` put off by twice that."""
    expected = logits.double().log_softmax(-1)
    assert found.top
    for token_id, logprob in found.top:
        assert abs(logprob - float(expected[token_id])) <= 2 * error


def largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0
