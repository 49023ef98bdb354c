"""The structures of the native kernels that Python fills in, by the names that they have there."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

EXPERT_NORMS = ("router_norm", "experts_norm", "experts_out_norm", "shared_norm", "shared_out_norm")
"""In the order that they have in Experts."""
MIXER_VECTORS = ("conv_bias", "decay", "step_bias", "skip", "gated_norm")
"""In the order that they have in Mixer, after the taps of the convolution."""


def fields(type: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type, one after another."""
    return [(name, type) for name in names.split()]


class Shape(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "num_heads num_kv_heads head_dim norms_rows norms_last shares latent plain"),
        *fields(c_float, "eps divisor softcap"),
        *fields(c_void_p, "q_norm k_norm v_norm cos sin q_scales sinks"),
    ]


class Router(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "experts top_k scoring groups top_groups group_best renormalizes"),
        *fields(c_float, "epsilon scale"),
        *fields(c_void_p, "choice_bias expert_scale"),
    ]


class Bend(ctypes.Structure):
    _fields_ = [("function", c_int32), *fields(c_float, "limit alpha shift")]


class Experts(ctypes.Structure):
    _fields_ = [
        ("router", Router),
        *fields(c_int32, "first own weighs_inputs each_reads_its_own"),
        ("activation", Bend),
        ("shared_activation", c_int32),
        *fields(c_void_p, "logits gate_up down shared_gate_up shared_down shared_gate"),
        *fields(c_void_p, " ".join(EXPERT_NORMS)),
    ]


class Mixer(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "kind key_heads heads keys values is_tiled kernel channels"),
        *fields(c_float, "eps least_step most_step"),
        *fields(c_void_p, "conv"),
        *fields(c_void_p, " ".join(MIXER_VECTORS)),
        *fields(c_void_p, "state history pending"),
    ]


class Op(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "kind time source target"),
        *fields(c_void_p, "linear norm"),
        *fields(c_int32, "is_centered adds"),
        *fields(c_float, "scale after"),
        *fields(c_int32, "gate part"),
        ("shape", ctypes.POINTER(Shape)),
        *fields(c_int32, "window first is_sampled table"),
        ("rows", c_void_p),
        ("rows_type", c_int32),
        *fields(c_void_p, "rows_norm keys values"),
        ("stride", c_int64),
        ("experts", ctypes.POINTER(Experts)),
        *fields(c_void_p, "of_queries of_latents"),
        ("mixer", ctypes.POINTER(Mixer)),
        *fields(c_int32, "gates follows_norm"),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "hidden qkv attended inner vocab max_position"),
        ("eps", c_float),
        ("embedding_type", c_int32),
        *fields(c_void_p, "embedding embedding_linear"),
        *fields(c_int32, "kv_type num_blocks num_tables"),
        ("kv", c_void_p),
        ("kv_bytes", c_int64),
        *fields(c_int32, "num_slots num_pending"),
        ("slot_floats", c_int64),
        ("states", c_void_p),
        ("ops", ctypes.POINTER(Op)),
        ("num_ops", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "token_ids positions query_starts context_lens block_tables sample_rows"),
        *fields(c_int32, "tokens sequences max_blocks samples"),
        *fields(c_void_p, "state_slots state_saves"),
        ("saves", c_int32),
        ("rotary_positions", c_void_p),
    ]


class FactorSource(ctypes.Structure):
    _fields_ = fields(c_void_p, "values units") + fields(c_int32, "type unit_type")


class LinearSource(ctypes.Structure):
    _fields_ = [
        *fields(c_int32, "type rows k gated group span is_exact rounding rotation"),
        ("weight", c_void_p),
        *fields(FactorSource, "scales offsets"),
        *fields(c_void_p, "permutation bias table"),
    ]


class BlockRows(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        *fields(c_int32, "type num_rows raised fault"),
        ("order", c_void_p),
    ]


class BlocksSource(ctypes.Structure):
    _fields_ = [("linear", c_void_p), *fields(c_int32, "has_offset num_parts"), ("parts", c_void_p)]


class GatherArgs(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "lengths prompt_lens last_tokens dropped block_tables"),
        *fields(c_int32, "num_rows max_blocks"),
        *fields(c_void_p, "seats query_starts token_ids"),
        *fields(c_int32, "num_sequences num_tokens num_blocks"),
        ("out", c_void_p),
    ]


class ChooseArgs(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "logits seats numbers token_ids candidates table biases counts masks"),
        *fields(c_int32, "num_rows first num_logits vocab num_seats max_biases num_counts top_k top_p"),
    ]


class LikelyArgs(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "logits rows norms token_ids logprobs"),
        *fields(c_int32, "num_rows vocab num"),
    ]


class StepTables(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "words lengths prompt_lens last_tokens dropped block_tables"),
        *fields(c_int32, "num_rows max_blocks num_tables width"),
        ("choose", ChooseArgs),
        ("choosable", c_void_p),
        ("num_choosable", c_int32),
    ]


class TableStep(ctypes.Structure):
    _fields_ = [
        ("words", c_void_p),
        *fields(c_int32, "num_sequences num_tokens num_changes num_blocks top_k top_p has_states num_saves"),
    ]


ALL: tuple[type[ctypes.Structure], ...] = (
    Shape, Router, Bend, Experts, Mixer, Op, Model, Step, FactorSource, LinearSource, BlockRows, BlocksSource,
    GatherArgs, ChooseArgs, LikelyArgs, StepTables, TableStep,
)  # fmt: skip
"""In the order of `penstock_sizes`."""
