"""The native decoder against the decoder in plain torch, and its promise that a row never depends on its company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.kernels.batch import Batch
from engine.kernels.cpu import build
from engine.kernels.cpu.native import (
    BLOCK_SIZE,
    NativeDecoder,
    NativeLayer,
    NativeLibrary,
    NativeUnavailable,
    PackedLinear,
    Team,
    load_library,
)
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.ops import Kernels, reference_kernels
from engine.model.config import ModelConfig, RopeConfig
from engine.model.parameters import LayerWeights, Weights
from engine.model.transformer import Decoder, rotary_tables

MAX_POSITION = 512
NUM_BLOCKS = 96
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return load_library(print)


@pytest.fixture(scope="module")
def team(library: NativeLibrary) -> Team:
    return library.start_team(2)


def config(**changes: object) -> ModelConfig:
    plain = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=83,
        hidden_size=48,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=100,
        rms_norm_eps=1e-5,
        max_position=MAX_POSITION,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class Checkpoint:
    """Random weights, already rounded to `dtype`, for both decoders."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> None:
        self.config = config
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.layers = [
            {
                "qkv": self._linear(config.q_size + 2 * config.kv_size, hidden, config.qkv_bias),
                "o": self._linear(hidden, config.q_size, config.o_bias),
                "gate_up": self._linear(2 * inner, hidden, config.mlp_bias),
                "down": self._linear(hidden, inner, config.mlp_bias),
            }
            for _ in range(config.num_layers)
        ]
        norms = [[self._norm(hidden), self._norm(hidden)] for _ in self.layers]
        self.norms: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = [
            (a, b, self._norm(config.head_dim), self._norm(config.head_dim))
            if config.qk_norm
            else (a, b, None, None)
            for a, b in norms
        ]
        self.final_norm = self._norm(hidden)
        self.embedding = self._rounded(torch.randn(config.vocab_size, hidden, generator=self.generator))
        tied = config.tie_word_embeddings
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
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            block_size=BLOCK_SIZE,
        )
        return KVCache(shape, NUM_BLOCKS, dtype, device)

    def reference(self) -> Decoder:
        return self.decoder(reference_kernels(CPU, torch.float32))

    def decoder(self, kernels: Kernels) -> Decoder:
        """The decoder over a kernel table."""

        def small(tensor: Tensor) -> Tensor:
            return tensor.to(kernels.device, kernels.activation_dtype)

        layers = [
            LayerWeights(
                input_norm=small(norms[0]),
                post_norm=small(norms[1]),
                q_norm=None if norms[2] is None else small(norms[2]),
                k_norm=None if norms[3] is None else small(norms[3]),
                **{name: kernels.linear(*layer[name]) for name in layer},
            )
            for layer, norms in zip(self.layers, self.norms, strict=True)
        ]
        weights = Weights(
            small(self.embedding), layers, small(self.final_norm), kernels.linear(self.lm_head, None)
        )
        return Decoder(self.config, weights, kernels, self.kv(kernels.kv_dtype, kernels.device), MAX_POSITION)

    def native(self, team: Team) -> NativeDecoder:
        cos, sin = rotary_tables(self.config, MAX_POSITION)
        layers = [
            NativeLayer(
                attention_norm=norms[0],
                mlp_norm=norms[1],
                q_norm=norms[2],
                k_norm=norms[3],
                qkv=PackedLinear(team, *layer["qkv"], self.dtype),
                o=PackedLinear(team, *layer["o"], self.dtype),
                gate_up=PackedLinear(team, *layer["gate_up"], self.dtype, gated=True),
                down=PackedLinear(team, *layer["down"], self.dtype),
            )
            for layer, norms in zip(self.layers, self.norms, strict=True)
        ]
        return NativeDecoder(
            team,
            self.config,
            embedding=None if self.config.tie_word_embeddings else self.embedding,
            layers=layers,
            final_norm=self.final_norm,
            lm_head=PackedLinear(team, self.lm_head, None, self.dtype),
            cos=cos,
            sin=sin,
            kv=self.kv(self.dtype).data.fill_(torch.nan),
        )


class Prompts:
    """Sequences of random tokens with scattered blocks; `batch` asks for a range of each."""

    def __init__(self, vocab: int, lengths: Sequence[int], seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
        blocks = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
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


def assert_equals_reference(checkpoint: Checkpoint, team: Team, tolerance: float = 1e-4) -> None:
    native, reference = checkpoint.native(team), checkpoint.reference()
    prompts = Prompts(checkpoint.config.vocab_size, [40, 150, 1, 17])
    for ranges in (
        {0: (0, 40), 1: (0, 63)},
        {1: (63, 149), 2: (0, 1), 3: (0, 16)},
        {3: (16, 17), 1: (149, 150)},
    ):
        batch = prompts.batch(ranges)
        torch.testing.assert_close(native(batch), reference(batch), atol=tolerance, rtol=tolerance)


VARIANTS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk norm": {"qk_norm": True},
    "windows": {"sliding_windows": (0, 20, 50)},
    "no groups": {"num_heads": 2},
    "groups of 4, head_dim 8": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8},
    "groups of 7, head_dim 24": {"num_heads": 14, "head_dim": 24},
    "head_dim 80": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 80},
    "head_dim 96": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 96},
    "one head for 53": {"num_heads": 53, "num_kv_heads": 1, "head_dim": 8},
    "nothing is a multiple": {"hidden_size": 37, "intermediate_size": 61, "vocab_size": 101},
    "wide": {"hidden_size": 256, "intermediate_size": 600, "num_layers": 1},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_plain_torch(team: Team, changes: dict[str, object]) -> None:
    assert_equals_reference(Checkpoint(config(**changes), torch.float32), team)


# The reference keeps its keys and values in float32: what is left is the rounding of the cache.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 5e-2)])
def test_half_precision_weights(team: Team, dtype: torch.dtype, tolerance: float) -> None:
    assert_equals_reference(Checkpoint(config(), dtype), team, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"sliding_windows": (0, 20, 50), "qk_norm": True, "num_heads": 14}])
def test_chunks_change_nothing(team: Team, dtype: torch.dtype, changes: dict[str, object]) -> None:
    checkpoint = Checkpoint(config(**changes), dtype)
    prompts = Prompts(checkpoint.config.vocab_size, [300])
    whole = checkpoint.native(team)(prompts.batch({0: (0, 300)}))
    decoder = checkpoint.native(team)
    cuts = [0, 1, 2, 33, 34, 129, 250, 300]
    parts = [decoder(prompts.batch({0: cut})) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_changes_nothing(team: Team, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint(config(), dtype)
    prompts = Prompts(checkpoint.config.vocab_size, [64, 200, 31, 31, 5, 130, 1, 77])
    ranges = {i: (0, len(tokens)) for i, tokens in enumerate(prompts.tokens)}
    together = checkpoint.native(team)(prompts.batch(ranges, all_rows=False))
    for i, cut in ranges.items():
        alone = checkpoint.native(team)(prompts.batch({i: cut}, all_rows=False))
        assert torch.equal(alone[0], together[i])


def test_the_number_of_threads_changes_nothing(team: Team, library: NativeLibrary) -> None:
    checkpoint = Checkpoint(config(), torch.float16)
    batch = Prompts(checkpoint.config.vocab_size, [64, 150]).batch({0: (0, 64), 1: (0, 150)})
    expected = checkpoint.native(team)(batch)
    for threads in (1, 5):
        other = library.start_team(threads)
        assert torch.equal(checkpoint.native(other)(batch), expected)
        other.close()


def test_where_blocks_lie_changes_nothing(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    a, b = Prompts(83, [120], seed=1), Prompts(83, [120], seed=1)
    b.tables = [list(range(NUM_BLOCKS - 8, NUM_BLOCKS))]
    first, second = (checkpoint.native(team)(p.batch({0: (0, 120)})) for p in (a, b))
    assert torch.equal(first, second)


def test_only_the_sampled_rows_are_answered(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    prompts = Prompts(83, [50, 20])
    batch = prompts.batch({0: (0, 50), 1: (0, 20)})
    every = checkpoint.native(team)(batch)
    wanted = [69, 3, 4, 5, 49, 50, 3]
    some = checkpoint.native(team)(replace(batch, sample_rows=ints(wanted)))
    assert torch.equal(some, every[wanted])


def test_a_step_that_samples_nothing_still_fills_the_cache(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float16)
    prompts = Prompts(83, [50])
    whole = checkpoint.native(team)(prompts.batch({0: (0, 50)}))
    decoder = checkpoint.native(team)
    none = decoder(replace(prompts.batch({0: (0, 40)}), sample_rows=ints([])))
    assert none.shape == (0, 83)
    assert torch.equal(decoder(prompts.batch({0: (40, 50)})), whole[40:])


BROKEN = {
    "token outside the vocabulary": ("token_ids", [0, 83, 1, 2]),
    "negative token": ("token_ids", [0, -1, 1, 2]),
    "position past the context": ("positions", [0, 1, 2, 4]),
    "context past the table": ("context_lens", [17]),
    "block that does not exist": ("block_tables", [[NUM_BLOCKS]]),
    "starts that do not divide": ("query_starts", [0, 3]),
    "sample row outside": ("sample_rows", [4]),
}


@pytest.mark.parametrize(("field", "value"), BROKEN.values(), ids=BROKEN.keys())
def test_an_impossible_batch_is_refused(team: Team, field: str, value: list[int]) -> None:
    decoder = Checkpoint(config(), torch.float32).native(team)
    batch = Prompts(83, [4]).batch({0: (0, 4)})
    setattr(batch, field, ints(value))
    with pytest.raises(ValueError, match=r"outside|does not|not a token"):
        decoder(batch)


def test_tensors_of_another_type_are_refused(team: Team) -> None:
    decoder = Checkpoint(config(), torch.float32).native(team)
    batch = Prompts(83, [4]).batch({0: (0, 4)})
    with pytest.raises(ValueError, match="positions"):
        decoder(replace(batch, positions=batch.positions.long()))
    with pytest.raises(ValueError, match="block_tables"):
        decoder(replace(batch, block_tables=ints([[1, 0, 0, 0]])[:, ::2]))


def test_weights_that_do_not_fit_are_refused(team: Team) -> None:
    checkpoint = Checkpoint(config(), torch.float32)
    checkpoint.config = config(intermediate_size=101)
    with pytest.raises(ValueError, match="gate_up"):
        checkpoint.native(team)
