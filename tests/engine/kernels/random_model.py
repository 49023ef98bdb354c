"""A small random model for tests of decoders, and prompts with scattered blocks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels import reference
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeLinear, Team
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape, is_quantized
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.program.decoders import make_decoder
from penstock.engine.program.lowering import decoder_program
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.parameters import AttentionWeights, LayerWeights, MlpWeights, Weights
from penstock.engine.quant.formats import DENSE
from penstock.engine.spec import Attention
from tests.engine.configs import llama_config

MAX_POSITION = 512
NUM_BLOCKS = 96
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")
WITH_TILES = ("amx", "tiles")
"""The levels at which caches of bfloat16 and int8 are multiplied by tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """The dtype of each part of a native model."""

    linear: torch.dtype
    embedding: torch.dtype | None
    """None: the embedding is the rows of the output head."""
    kv: torch.dtype

    @classmethod
    def same(cls, dtype: torch.dtype) -> Types:
        return cls(linear=dtype, embedding=dtype, kv=dtype)


def config(**changes: Any) -> ModelConfig:
    plain = {
        "vocab_size": 83,
        "hidden_size": 48,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position": MAX_POSITION,
        "tie_word_embeddings": True,
    }
    return llama_config(**{**plain, **changes})


class Checkpoint:
    """Random weights, already rounded to `dtype`, for every decoder."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> None:
        self.config = config
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        hidden, inner = config.hidden_size, config.intermediate_size
        attention, mlp = config.attentions[0], config.layers[0].feed_forward
        assert mlp is not None
        assert isinstance(attention, Attention)
        self.layers = [
            {
                "qkv": self._linear(config.q_size + 2 * config.kv_size, hidden, attention.qkv_bias),
                "o": self._linear(hidden, config.q_size, attention.o_bias),
                "gate_up": self._linear(2 * inner, hidden, mlp.has_bias),
                "down": self._linear(hidden, inner, mlp.has_bias),
            }
            for _ in range(config.num_layers)
        ]
        norms = [[self._norm(hidden), self._norm(hidden)] for _ in self.layers]
        self.norms: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = [
            (a, b, self._norm(config.head_dim), self._norm(config.head_dim))
            if attention.q_norm
            else (a, b, None, None)
            for a, b in norms
        ]
        self.final_norm = self._norm(hidden)
        self.embedding = self._rounded(torch.randn(config.vocab_size, hidden, generator=self.generator))
        tied = config.spec.ties_embeddings
        self.lm_head = self.embedding if tied else self._linear(config.vocab_size, hidden, False)[0]

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).float()

    def _norm(self, size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=self.generator)

    def _linear(self, rows: int, k: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._rounded(torch.randn(rows, k, generator=self.generator) * k**-0.5)
        return weight, torch.randn(rows, generator=self.generator) * 0.1 if bias else None

    def kv(self, dtype: torch.dtype, device: torch.device = CPU) -> KVCache:
        c = self.config
        shape = KVShape(
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            block_size=BLOCK_SIZE,
        )
        return KVCache(KVLayout.even(shape, c.num_layers), NUM_BLOCKS, dtype, device)

    def decoder(self, kernels: Kernels) -> TableModel:
        return TableModel(self, kernels)

    def plain(self) -> PlainModel:
        return PlainModel(self, self.kv(torch.float32))

    def native(self, team: Team, types: Types | None = None) -> NativeModel:
        return NativeModel(self, team, types or Types.same(self.dtype))


class NativeModel:
    """The native decoder with an output head: batch -> logits [R, vocab]. Its cache starts as NaN."""

    def __init__(self, checkpoint: Checkpoint, team: Team, types: Types) -> None:
        def packed(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> NativeLinear:
            return NativeLinear(team, weight, bias, types.linear, gated)

        config = checkpoint.config
        is_tied = config.spec.ties_embeddings or types.embedding is None
        self.lm_head = packed(checkpoint.lm_head)
        self.kv = checkpoint.kv(types.kv)
        self.kv.data.view(torch.uint8).fill_(255)  # a NaN in all types
        by_tiles = team.library.level in WITH_TILES and types.kv in (torch.bfloat16, torch.int8)
        self.attends_in = torch.bfloat16 if by_tiles else torch.float32
        layers = [
            LayerWeights(
                input_norm=norms[0],
                post_norm=norms[1],
                mixer=AttentionWeights(
                    qkv=packed(*layer["qkv"]), o=packed(*layer["o"]), q_norm=norms[2], k_norm=norms[3]
                ),
                feed_forward=MlpWeights(packed(*layer["gate_up"], gated=True), packed(*layer["down"])),
            )
            for layer, norms in zip(checkpoint.layers, checkpoint.norms, strict=True)
        ]
        embedding = self.lm_head if is_tied else checkpoint.embedding.to(types.embedding)
        weights = Weights(embedding, layers, checkpoint.final_norm, self.lm_head, is_tied=is_tied)
        self.decoder = NativeDecoder(
            team,
            self.kv,
            decoder_program(config.spec, weights, MAX_POSITION, types.embedding or types.linear),
        )

    def __call__(self, batch: Batch) -> Tensor:
        return self.lm_head(self.decoder(batch))


class TableModel:
    """The decoder over a kernel table, with an output head: batch -> logits [R, vocab]."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        def moved(tensor: Tensor | None, dtype: torch.dtype = kernels.activation_dtype) -> Tensor | None:
            return None if tensor is None else tensor.to(kernels.device, dtype)

        def linear(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
            return kernels.linear({"weight": weight}, DENSE, bias, gated=gated)

        config = checkpoint.config
        layers = [
            LayerWeights(
                input_norm=norms[0].to(kernels.device, kernels.activation_dtype),
                post_norm=norms[1].to(kernels.device, kernels.activation_dtype),
                mixer=AttentionWeights(
                    qkv=linear(*layer["qkv"]),
                    o=linear(*layer["o"]),
                    q_norm=moved(norms[2]),
                    k_norm=moved(norms[3]),
                ),
                feed_forward=MlpWeights(linear(*layer["gate_up"], gated=True), linear(*layer["down"])),
            )
            for layer, norms in zip(checkpoint.layers, checkpoint.norms, strict=True)
        ]
        weights = Weights(
            embedding=checkpoint.embedding.to(kernels.device, kernels.embedding_dtype),
            layers=layers,
            final_norm=checkpoint.final_norm.to(kernels.device, kernels.activation_dtype),
            lm_head=linear(checkpoint.lm_head),
            is_tied=config.spec.ties_embeddings,
        )
        self.kv = checkpoint.kv(kernels.kv_dtype, kernels.device)
        self.lm_head = weights.lm_head
        self.decoder = make_decoder(config, weights, kernels, self.kv, MAX_POSITION)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        return self.lm_head(self.decoder(batch))


class PlainModel:
    """The decoder in the reference operations of `engine.kernels.reference`, float32."""

    def __init__(self, checkpoint: Checkpoint, kv: KVCache) -> None:
        self.checkpoint, self.kv = checkpoint, kv
        self.cos, self.sin = rotary_tables(checkpoint.config)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        c = self.checkpoint
        slots = reference.kv_places(batch, self.kv.block_size)
        places = reference.TokenPlaces(batch.positions, slots, self.cos, self.sin)
        attention = reference.PagedAttention(batch, self.kv.layout.places[0].shape)
        hidden = F.embedding(batch.token_ids, c.embedding)
        for index, layer in enumerate(c.layers):
            input_norm, post_norm, q_norm, k_norm = c.norms[index]
            eps, layer_kv = c.config.spec.norm_eps, self.kv.layer(index)
            window, shape = c.config.attentions[index].window, self.kv.layout.places[index].shape
            qkv = F.linear(reference.rms_norm(hidden, input_norm, eps), *layer["qkv"])
            queries = reference.rotate_and_write(
                qkv, q_norm, k_norm, eps, places, layer_kv, shape, spreads=is_quantized(layer_kv.dtype)
            )
            hidden = hidden + F.linear(attention(queries, layer_kv, window), *layer["o"])
            gate_up = F.linear(reference.rms_norm(hidden, post_norm, eps), *layer["gate_up"])
            hidden = hidden + F.linear(reference.glu(gate_up), *layer["down"])
        wanted = hidden[batch.sample_rows.long()]
        return F.linear(reference.rms_norm(wanted, c.final_norm, c.config.spec.norm_eps), c.lm_head)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [MAX_POSITION, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(MAX_POSITION).float(), config.spec.ropes[0].theta ** -exponents)
    return angles.cos(), angles.sin()


class Prompts:
    """Sequences of random tokens with scattered blocks; `batch` asks for a range of each."""

    def __init__(
        self, vocab: int, lengths: Sequence[int], seed: int = 1, num_blocks: int = NUM_BLOCKS
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
        blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.tables: list[list[int]] = []
        for n in lengths:
            count = -(-n // BLOCK_SIZE)
            self.tables.append(blocks[:count])
            del blocks[:count]

    def batch(self, ranges: dict[int, tuple[int, int]], all_rows: bool = True) -> Batch:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        starts = [0]
        for sequence, (start, end) in ranges.items():
            token_ids += self.tokens[sequence][start:end]
            positions += range(start, end)
            starts.append(len(token_ids))
            rows += range(starts[-2] if all_rows else starts[-1] - 1, starts[-1])
        width = max(len(self.tables[s]) for s in ranges)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s in ranges]
        ends = [end for _, end in ranges.values()]
        return Batch(ints(token_ids), ints(positions), ints(starts), ints(ends), ints(tables), ints(rows))


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
