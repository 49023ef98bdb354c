"""Layers with a state in GGUF files: their metadata, their tensors, and the layout of these."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.model.families.common import CONV, FULL, LINEAR
from penstock.engine.model.gguf.container import Header
from penstock.engine.spec import Mamba2, ShortConv, StateMixer

_PLACES = {"ssm_out": LINEAR, "shortconv.conv": CONV, "attn_q": FULL, "ffn_up_exps": "moe", "ffn_up": "mlp"}
"""The kind of a layer, by the first tensor of this list that the layer has."""

_ENTRIES = {
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"),
    "ssm.state_size": ("linear_key_head_dim", "state_size", "ssm_state_size", "mamba_d_state"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups", "mamba_n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "num_heads", "mamba_num_heads", "mamba_n_heads"),
    "shortconv.l_cache": ("conv_L_cache",),
}
"""The keys of numbers, and the families' names for them in a config.json."""
_HEAD_DIM = ("linear_value_head_dim", "mamba_head_dim", "mamba_d_head")

DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "post_attention_norm": "post_attention_layernorm",
}
"""ggml's names of a gated delta net, and transformers'."""
_PARTS = (DELTA["attn_qkv"], DELTA["attn_gate"])
SHORT_CONV = {f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "out_proj", "conv")}


def mamba_names(prefix: str) -> dict[str, str]:
    """ggml's names of a Mamba-2 mixer, and transformers'."""
    names = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm"}
    tensors = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {ggml: f"{prefix}.{name}" for ggml, name in (names | tensors).items()}


def state_entries(header: Header, name: str, depth: int) -> dict[str, object]:
    """The entries of a config.json for a model's layers with a state, if it has any.

    Raises:
        CheckpointError: a layer is of no kind, or a size is missing or malformed.
    """
    kinds = [_kind(header, layer) for layer in range(depth)]
    if not {LINEAR, CONV} & {*kinds}:
        return {}
    fields = header.fields
    for layer, kind in enumerate(kinds):
        if kind is None:
            raise fields.error(f"layer {layer} has tensors of no kind of layers that is known")
    wanted = [key for key in _ENTRIES if key.startswith("ssm.") == (LINEAR in kinds)]
    found: dict[str, object] = {
        entry: fields.size(f"{name}.{key}") for key in wanted for entry in _ENTRIES[key]
    }
    if LINEAR in kinds:
        found |= _of_heads(header, name, kinds)
    own = {"layer_types": kinds, "layers_block_type": kinds, "block_auto_adjust_ff_dim": False}
    if fields.has(key := f"{name}.feed_forward_length"):  # of Granite's dense models
        own["shared_intermediate_size"] = max(fields.layer_sizes(key, depth, least=0))
    return {**found, **own, **_of_positions(header, name), **_biases(header, kinds)}


def _kind(header: Header, layer: int) -> str | None:
    has = (kind for tensor, kind in _PLACES.items() if f"blk.{layer}.{tensor}.weight" in header.tensors)
    return next(has, None)


def _of_heads(header: Header, name: str, kinds: list[str | None]) -> dict[str, object]:
    """The size of a head, and how much wider than the model all of them are."""
    fields = header.fields
    inner, heads = fields.size(f"{name}.ssm.inner_size"), fields.size(f"{name}.ssm.time_step_rank")
    if inner % heads:
        raise fields.error(
            f"{name}.ssm.inner_size is {inner}, which does not lie in the {heads} heads of ssm.time_step_rank"
        )
    names = _HEAD_DIM if FULL in kinds else (*_HEAD_DIM, "head_dim")
    hidden = fields.size(f"{name}.embedding_length")
    return {**dict.fromkeys(names, inner // heads), "mamba_expand": inner / hidden}


def _of_positions(header: Header, name: str) -> dict[str, object]:
    rotates = header.fields.flag(f"{name}.rope.scaling.finetuned", True)
    return {"position_embedding_type": "rope" if rotates else "nope"}


def _biases(header: Header, kinds: list[str | None]) -> dict[str, object]:
    """Which of a mixer's maps and convolutions have biases; the first of its kind speaks for all."""

    def has(kind: str, tensor: str) -> bool:
        return kind in kinds and f"blk.{kinds.index(kind)}.{tensor}.bias" in header.tensors

    of_conv, of_maps = has(LINEAR, "ssm_conv1d"), has(LINEAR, "ssm_in")
    return {
        **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), of_conv),
        **dict.fromkeys(("use_bias", "mamba_proj_bias"), of_maps),
        "conv_bias": has(CONV, "shortconv.in_proj"),
        "use_expert_bias": any(tensor.endswith(".exp_probs_b.bias") for tensor in header.tensors),
    }


def stored_state(mixer: StateMixer, layer: int, header: Header, name: str) -> StateMixer:
    """The mixer as a file has it: the logarithms of decays are taken already, and value heads may lie by tiles."""
    if isinstance(mixer, ShortConv):
        return mixer
    if isinstance(mixer, Mamba2):
        return replace(mixer, has_log_decay=False)
    parts = _PARTS if f"blk.{layer}.attn_qkv.weight" in header.tensors else mixer.into
    return replace(mixer, has_log_decay=False, is_tiled=name != "qwen3next", into=parts)
