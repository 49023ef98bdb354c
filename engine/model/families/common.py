"""The parts that descriptions of families are put together from, and the entries of a config.json that many share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.spec import (
    Activation,
    Attention,
    Experts,
    Layer,
    Mixer,
    Mlp,
    ModelSpec,
    Norm,
    Prediction,
    Rope,
    Router,
)

MAX_LAYERS = 4096
"""No model has more layers. Lists with an entry for each layer are made before the tensors prove that the layers are
there."""
MAX_POSITIONS = 1 << 24
"""More than any model has: no tensor backs this number, and the tables of the rotary embedding have a row for each."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV = "linear_attention", "conv"
OLD_KINDS = {"attention": FULL, "mamba": LINEAR}
"""The names that transformers 4 has for layers of models with both kinds."""
MAX_KERNEL = 64
"""More rows than a convolution of any model reads."""
FUSED_QKV, FUSED_GATE_UP = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
FINAL_NORM = "model.norm"
_PREDICTING = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""The entries that count layers of multi-token prediction."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that every config.json has, and how the parts of a layer follow from them."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    activation: str
    max_position: int
    eps: float

    @classmethod
    def of(cls, fields: Fields, *, head_dim: int | None = None, eps: str = "rms_norm_eps") -> Sizes:
        """Reads the sizes of a config.

        Args:
            head_dim: the value of a missing one; without it, hidden_size / num_attention_heads.
            eps: the entry of the norms' epsilon.

        Raises:
            CheckpointError: names the entry that is missing, malformed or not supported.
        """
        hidden, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
        activation = fields.one_of(name, *_ACTIVATIONS, default="silu")
        found = cls(
            hidden=hidden,
            num_layers=fields.size("num_hidden_layers", most=MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=fields.size("num_key_value_heads", num_heads),
            head_dim=fields.size("head_dim", head_dim or max(1, hidden // num_heads)),
            inner=fields.size("intermediate_size"),
            activation=_ACTIVATIONS[activation],
            max_position=fields.size("max_position_embeddings", most=MAX_POSITIONS),
            eps=fields.positive(eps, 1e-6),
        )
        check_heads(fields.source, num_heads, found.num_kv_heads, found.head_dim)
        return found

    def attention(self, **changes: object) -> Attention:
        plain = {
            "hidden_size": self.hidden,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "scale": self.head_dim**-0.5,
        }
        return Attention(**{**plain, **changes})

    def mlp(self, **changes: object) -> Mlp:
        plain = {"hidden_size": self.hidden, "inner_size": self.inner, "activation": self.activation}
        return Mlp(**{**plain, **changes})  # type: ignore[arg-type]

    def shared(self, prefix: str, inner_size: int, **changes: object) -> Mlp:
        """The shared experts of a layer, which are one part."""
        names = tuple(f"{prefix}.{name}_proj" for name in ("gate", "up"))
        down = f"{prefix}.down_proj"
        return self.mlp(inner_size=inner_size, gate_up=names, down=down, **changes)

    def experts(self, router: Router, **changes: object) -> Experts:
        plain = {
            "hidden_size": self.hidden,
            "inner_size": self.inner,
            "router": router,
            "activation": Activation(kind=self.activation),
        }
        return Experts(**{**plain, **changes})  # type: ignore[arg-type]

    def norm(self, name: str, **changes: object) -> Norm:
        return Norm(name=name, size=self.hidden, **changes)  # type: ignore[arg-type]

    def head_norms(self, *, q: str = "q_norm", k: str = "k_norm", offset: float = 0.0) -> dict[str, Norm]:
        """The norms of each query and key head."""
        return {
            "q_norm": Norm(name=f"self_attn.{q}", size=self.head_dim, offset=offset),
            "k_norm": Norm(name=f"self_attn.{k}", size=self.head_dim, offset=offset),
        }

    def row_norms(self) -> dict[str, Norm]:
        """The norms of all query heads as one row, and of all key heads."""
        return {
            "q_norm": Norm(name="self_attn.q_norm", size=self.num_heads * self.head_dim),
            "k_norm": Norm(name="self_attn.k_norm", size=self.num_kv_heads * self.head_dim),
        }

    def layer(self, mixer: Mixer, mlp: Mlp | Experts | None = None, **changes: object) -> Layer:
        """Llama's: each part reads a norm of the stream."""
        plain = {
            "mixer": mixer,
            "feed_forward": mlp or self.mlp(),
            "input_norm": self.norm("input_layernorm"),
            "post_norm": self.norm("post_attention_layernorm"),
        }
        return Layer(**{**plain, **changes})  # type: ignore[arg-type]

    def prediction(
        self, fields: Fields, layer: Layer, names: Mapping[str, str], offset: float = 0.0
    ) -> Prediction | None:
        """The layer of multi-token prediction, unless a config says that there is none.

        Of several, the first alone drafts. Some configs do not mention theirs.

        Args:
            names: the names of modules outside of the layer, and the prefix of its own; see `names_behind`.
            offset: of its norms.
        """
        told = [fields.integer(name) for name in _PREDICTING if fields.has(name)]
        if told and not any(told):
            return None
        return Prediction(
            layer=layer,
            token_norm=self.norm(names["token_norm"], offset=offset),
            features_norm=self.norm(names["features_norm"], offset=offset),
            final_norm=self.norm(names["final_norm"], offset=offset),
            map=names["map"],
            prefix=names["prefix"],
            is_told=bool(told),
        )

    def model(
        self, layers: Sequence[Layer], ropes: Sequence[Rope], fields: Fields, **changes: object
    ) -> ModelSpec:
        plain = {
            "hidden_size": self.hidden,
            "layers": tuple(layers),
            "ropes": tuple(ropes),
            "norm_eps": self.eps,
            "final_norm": self.norm(FINAL_NORM),
            "ties_embeddings": fields.flag("tie_word_embeddings"),
        }
        return ModelSpec(**{**plain, **changes})  # type: ignore[arg-type]


def names_behind(num_layers: int) -> dict[str, str]:
    """Returns DeepSeek's names of a layer of multi-token prediction, which follows the model's own layers."""
    prefix = f"model.layers.{num_layers}."
    return {
        "prefix": prefix,
        "token_norm": f"{prefix}enorm",
        "features_norm": f"{prefix}hnorm",
        "final_norm": f"{prefix}shared_head.norm",
        "map": f"{prefix}eh_proj",
    }


def check_heads(source: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Checks that attention can have such heads.

    Raises:
        CheckpointError: naming the source, and the sizes that do not go together.
    """
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} heads cannot share {num_kv_heads} key-value heads "
            "(num_attention_heads, num_key_value_heads)"
        )
    if head_dim % 2:
        raise CheckpointError(
            f"{source}: head_dim (hidden_size / num_attention_heads if it is left out) is {head_dim}, "
            "and the rotary embedding needs an even one"
        )


def layer_types(
    fields: Fields, num_layers: int, is_full: Callable[[int], bool], other: str = SLIDING
) -> list[str]:
    """Returns FULL or the other kind for each layer, by `layer_types`, or without it by the family's own rule.

    Raises:
        CheckpointError: it says something else, or not of each layer.
    """
    kinds = hybrid_kinds(fields, "layer_types", FULL, other)
    kinds = kinds or [FULL if is_full(i) else other for i in range(num_layers)]
    if len(kinds) < num_layers:
        raise fields.error(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return kinds[:num_layers]


def hybrid_kinds(fields: Fields, name: str, *allowed: str) -> list[str]:
    """The kinds of layers that an entry lists, old names among them where all of them mean something."""
    old = OLD_KINDS if {*OLD_KINDS.values()} <= {*allowed} else {}
    return [old.get(kind, kind) for kind in fields.strings(name, *allowed, *old)]


def window_of(fields: Fields) -> int:
    """Returns the window of all layers: null is no window, and a missing entry is the 4096 of the first Mistral 7B."""
    return (fields.optional_size("sliding_window") or 0) if "sliding_window" in fields else 4096


def rotating(fields: Fields, num_layers: int) -> list[bool]:
    """Returns whether each layer rotates positions: not where `no_rope_layers` is 0, or without it, in every fourth.

    Raises:
        CheckpointError: `no_rope_layers` is not of each layer.
    """
    every = fields.size("no_rope_layer_interval", 4)
    found = fields.integers("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if len(found) < num_layers:
        raise fields.error("no_rope_layers does not have an entry for each layer")
    return [bool(number) for number in found[:num_layers]]


def read_rope(
    fields: Fields,
    sizes: Sizes,
    *,
    kind: str | None = None,
    theta: float = 10_000.0,
    share: float = 1.0,
    scales: bool = True,
) -> Rope:
    """Reads a table: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4.

    Args:
        kind: of the layers that the table is for, where `rope_parameters` has one for each kind.
        theta, share: the values of missing entries.
        scales: whether the `rope_scaling` of transformers 4 is of this table.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    if fields.has("rope_parameters") or not scales:
        rope = fields.nested("rope_parameters")
    else:
        rope = fields.nested("rope_scaling")
    if kind is not None and rope.has(kind):
        rope = rope.nested(kind)
    scaling = rope.text("rope_type", rope.text("type", "default"))
    if scaling not in _SCALINGS:
        raise rope.error(f"rope_type {scaling} is not supported; supported are {', '.join(_SCALINGS)}")
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", share))
    rotated = int(sizes.head_dim * share)
    if not 0 < share <= 1 or rotated % 2 or not rotated:
        raise rope.error(
            f"partial_rotary_factor {share:g} rotates {rotated} of the {sizes.head_dim} of head_dim, which "
            "must be an even number of them"
        )
    theta = rope.positive("rope_theta", fields.positive("rope_theta", theta))
    return _SCALINGS[scaling](Rope(theta=theta, share=share), rope, fields, sizes)


def _default(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:  # noqa: ARG001
    return plain


def _linear(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:
    return _stretched(replace(plain, scaling="linear"), rope, _original(rope, fields, sizes))


def _stretched(plain: Rope, rope: Fields, original: int, factor: float | None = None) -> Rope:
    """The table with the entry `factor`.

    Raises:
        CheckpointError: it makes more positions of the original ones than any model has.
    """
    found = rope.positive("factor", factor)
    if original * found > MAX_POSITIONS:
        raise rope.error(
            f"factor {found:g} makes more than {MAX_POSITIONS} positions of {original} "
            "(original_max_position_embeddings)"
        )
    return replace(plain, factor=found, original_max_position=original)


def _llama3(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:
    return replace(
        plain,
        scaling="llama3",
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position=_original(rope, fields, sizes),
    )


def _yarn(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:
    original = _original(rope, fields, sizes)
    plain = _stretched(plain, rope, original, max(1.0, sizes.max_position / original))
    factor = plain.factor
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    usual = yarn_magnitude(factor, 1.0)
    if mscale and mscale_all:
        usual = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return replace(
        plain,
        scaling="yarn",
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        magnitude=rope.positive("attention_factor", usual),
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Yarn's factor of cosines and sines, by which a rotation makes rows longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:
    """A theta that grows with the length; Hunyuan's `alpha` is one that does not."""
    if not rope.has("alpha"):
        return _stretched(replace(plain, scaling="dynamic"), rope, _original(rope, fields, sizes))
    exponent = sizes.head_dim / max(1, sizes.head_dim - 2)
    return replace(plain, theta=plain.theta * rope.positive("alpha") ** exponent)


def _longrope(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:
    """Sequences beyond the original length have factors of their own, so which ones serve is fixed by the longest."""
    original = _original(rope, fields, sizes)
    count = int(sizes.head_dim * plain.share) // 2
    long, short = (tuple(map(float, rope.numbers(name))) for name in ("long_factor", "short_factor"))
    for name, factors in (("long_factor", long), ("short_factor", short)):
        if len(factors) != count or min(factors) <= 0:
            raise rope.error(
                f"{name} has {len(factors)} entries, and it must have {count}, all greater than 0"
            )
    stretch = rope.positive("factor", sizes.max_position / original)
    usual = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return replace(
        plain,
        scaling="factors",
        factors=long,
        short_factors=short,
        original_max_position=original,
        magnitude=rope.positive("attention_factor", usual),
    )


def _proportional(plain: Rope, rope: Fields, fields: Fields, sizes: Sizes) -> Rope:  # noqa: ARG001
    return replace(plain, scaling="proportional", factor=rope.positive("factor", 1.0))


def _original(rope: Fields, fields: Fields, sizes: Sizes) -> int:
    name = "original_max_position_embeddings"
    return rope.size(name, fields.size(name, sizes.max_position))


_SCALINGS: dict[str, Callable[[Rope, Fields, Fields, Sizes], Rope]] = {
    "default": _default,
    "mrope": _default,  # the three positions of a text's token are the same
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
