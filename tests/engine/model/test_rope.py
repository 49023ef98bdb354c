"""Rotary embedding against transformers for random parameters, and what makes it one at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.engine.config import ModelConfig
from penstock.engine.fields import Fields
from penstock.engine.kernels.reference import rotary
from penstock.engine.model.parse import parse_config
from penstock.engine.program.rotary import inverse_frequencies, rotary_tables
from penstock.engine.spec import Rope
from tests.engine.checkpoints import make_config
from tests.engine.ranges import FUNCTION, gamma
from tests.few import examples

CPU = torch.device("cpu")
head_dims = st.sampled_from([8, 16, 24, 32, 64, 80, 128])
thetas = st.floats(500.0, 5e6)
factors = st.floats(1.0, 64.0)


def theirs(rope: dict[str, Any], head_dim: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        head_dim=head_dim,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=rope,
    )


def ours(rope: dict[str, Any], head_dim: int) -> ModelConfig:
    changes = {"rope_scaling": None, "rope_parameters": rope, "head_dim": head_dim}
    return parse_config(Fields("config.json", make_config("llama", **changes)))


@st.composite
def llama3_ropes(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.floats(0.25, 4.0))
    return {
        "rope_type": "llama3",
        "rope_theta": draw(thetas),
        "factor": draw(factors),
        "low_freq_factor": low,
        "high_freq_factor": low + draw(st.floats(0.5, 8.0)),
        "original_max_position_embeddings": draw(st.sampled_from([64, 512, 4096, 8192, 131072])),
    }


@settings(max_examples=examples(100), deadline=None)
@given(llama3_ropes(), head_dims)
def test_llama3_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    expected, attention_factor = init(theirs(rope, head_dim), CPU)
    assert attention_factor == 1.0
    assert torch.equal(inverse_frequencies(ours(rope, head_dim).spec.ropes[0], head_dim), expected)


@settings(max_examples=examples(40), deadline=None)
@given(thetas, factors, head_dims)
def test_linear_frequencies_are_those_of_transformers(theta: float, factor: float, head_dim: int) -> None:
    rope = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["linear"](theirs(rope, head_dim), CPU)
    assert torch.equal(inverse_frequencies(ours(rope, head_dim).spec.ropes[0], head_dim), expected)


@settings(max_examples=examples(40), deadline=None)
@given(thetas, factors, head_dims, st.integers(1, 20_000))
def test_dynamic_frequencies_are_those_of_transformers_for_the_longest_sequence(
    theta: float, factor: float, head_dim: int, longest: int
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
    expected, _ = init(theirs(rope, head_dim), CPU, seq_len=longest)
    own = Rope(theta=theta, scaling="dynamic", factor=factor, original_max_position=4096)
    found = inverse_frequencies(own, head_dim, longest)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-5)
    if longest <= 4096:
        assert torch.equal(found, inverse_frequencies(Rope(theta=theta), head_dim))


_LLAMA3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE = {
    "type": "longrope",
    "long_factor": [1.0 + i for i in range(24)],
    "short_factor": [1.0 + i / 10 for i in range(24)],
}
_PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Qwen 2.5": (
        "Qwen2",
        {
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        },
        131_072,
    ),
    "Qwen 3": (
        "Qwen3",
        {
            "head_dim": 64,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        },
        131_072,
    ),
    "Llama 3.1": (
        "Llama",
        {
            "max_position_embeddings": 131_072,
            "rope_theta": 5e5,
            "rope_scaling": {**_LLAMA3_1, "original_max_position_embeddings": 8192},
        },
        131_072,
    ),
    "Phi 4 mini": (
        "Phi3",
        {
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "pad_token_id": 0,
            "rope_scaling": _LONGROPE,
        },
        131_072,
    ),
}
"""By model, its class, what its config.json says for long contexts, and the positions that come of it."""


@pytest.mark.parametrize("name", _PUBLISHED)
def test_long_contexts_as_published_have_the_positions_and_angles_of_transformers(name: str) -> None:
    kind, entries, num_positions = _PUBLISHED[name]
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    entries = {**sizes, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, **entries}
    architecture = {"architectures": [f"{kind}ForCausalLM"], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    found = parse_config(Fields("config.json", {**entries, **architecture, "num_hidden_layers": 2}))
    assert found.max_position == num_positions
    embedding = {"Phi3": Phi3RotaryEmbedding}.get(kind, LlamaRotaryEmbedding)
    positions = torch.tensor([0, 5, 4095, 8191, 40_000, num_positions - 1])
    expected = embedding(getattr(transformers, f"{kind}Config")(**entries))(torch.zeros(1), positions[None])
    tables = rotary_tables(found.spec.ropes[0], found.attentions[0].head_dim, num_positions)
    for own, wanted in zip(tables, expected, strict=True):
        half = wanted.shape[-1] // 2
        assert torch.equal(own[positions, :half], wanted[0, :, :half])


@settings(max_examples=examples(40), deadline=None)
@given(llama3_ropes() | st.builds(lambda t: {"rope_type": "default", "rope_theta": t}, thetas), head_dims)
def test_turned_heads_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    positions = torch.tensor([[0, 1, 2, 17, 63, 64, 500, 511]])
    generator = torch.Generator().manual_seed(head_dim)
    queries, keys = torch.randn(2, 1, 2, positions.numel(), head_dim, generator=generator)
    cos, sin = LlamaRotaryEmbedding(theirs(rope, head_dim))(queries, positions)
    expected = apply_rotary_pos_emb(queries, keys, cos, sin)
    tables = rotary_tables(ours(rope, head_dim).spec.ropes[0], head_dim, 512)
    rows = [table[positions[0]] for table in tables]
    for x, wanted in zip((queries, keys), expected, strict=True):
        found = rotary(x[0].transpose(0, 1), *rows).transpose(0, 1)[None]
        # The angles are the same numbers: cos and sin, two products and a sum may be off on either side.
        largest = x.abs() + x.roll(head_dim // 2, -1).abs()
        assert ((found - wanted).abs() <= 2 * gamma(FUNCTION + 2) * largest).all()


@settings(max_examples=examples(60), deadline=None)
@given(llama3_ropes(), head_dims)
def test_llama3_stretches_by_at_most_the_factor_and_keeps_the_order(
    rope: dict[str, Any], head_dim: int
) -> None:
    config = ours(rope, head_dim).spec.ropes[0]
    scaled = inverse_frequencies(config, head_dim).double()
    plain = inverse_frequencies(Rope(theta=config.theta), head_dim).double()
    # Between its ends a frequency is a weighted mean of two: six roundings.
    assert (scaled <= plain * (1 + gamma(6))).all()
    assert (scaled * config.factor >= plain * (1 - gamma(6))).all()
    assert (scaled.diff() <= gamma(6) * plain[:-1]).all()
    wavelengths = 2 * math.pi / plain
    short = wavelengths < 0.999 * config.original_max_position / config.high_freq_factor
    long = wavelengths > 1.001 * config.original_max_position / config.low_freq_factor
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long] * config.factor, plain[long], atol=0, rtol=gamma(2))


@settings(max_examples=examples(40), deadline=None)
@given(head_dims, st.integers(0, 200), st.integers(0, 200), st.integers(1, 100))
def test_a_product_of_query_and_key_depends_on_their_distance_alone(
    head_dim: int, query_at: int, key_at: int, shift: int
) -> None:
    cos, sin = rotary_tables(Rope(), head_dim, 512)
    generator = torch.Generator().manual_seed(head_dim)
    query, key = torch.randn(2, 1, 1, head_dim, generator=generator)

    def product(a: int, b: int) -> float:
        turned = [rotary(x, cos[[at]], sin[[at]]) for x, at in ((query, a), (key, b))]
        return float((turned[0].double() * turned[1].double()).sum())

    here, there = product(query_at, key_at), product(query_at + shift, key_at + shift)
    # An angle is off by a rounding of itself, and no frequency is above 1; then as above, for the query and the key.
    each = [(query_at + key_at + each) * gamma(1) + 2 * gamma(FUNCTION + 2) for each in (0, 2 * shift)]
    pairs = [x.unflatten(-1, (2, -1)).norm(dim=-2) for x in (query, key)]
    assert abs(here - there) <= 2 * sum(each) * float((pairs[0] * pairs[1]).sum())


@settings(max_examples=examples(40), deadline=None)
@given(llama3_ropes(), head_dims, st.integers(1, 300))
def test_turning_keeps_lengths_and_leaves_position_0_as_it_is(
    rope: dict[str, Any], head_dim: int, length: int
) -> None:
    cos, sin = rotary_tables(ours(rope, head_dim).spec.ropes[0], head_dim, length)
    assert cos.shape == sin.shape == (length, head_dim // 2)
    x = torch.randn(length, 3, head_dim, generator=torch.Generator().manual_seed(length))
    turned = rotary(x, cos, sin)
    assert torch.equal(turned[0], x[0])
    lengths = [each.double().norm(dim=-1) for each in (turned, x)]
    torch.testing.assert_close(*lengths, atol=0, rtol=2 * gamma(FUNCTION + 2))
