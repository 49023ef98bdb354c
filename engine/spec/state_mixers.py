"""Mixers that keep a state of fixed size of the tokens before, in place of keys and values of each."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.spec.maps import Groups, LinearMap, Norm, Rows, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Gated delta net: a matrix for each value head, from which each token erases the value at its key before it adds.

    A causal convolution of each channel, then SiLU, makes queries, keys and values of the rows; `recurrent.gated_delta`
    is the specification of the rest.
    """

    hidden_size: int
    num_key_heads: int
    """Of queries, too."""
    num_value_heads: int
    """A multiple of the key heads."""
    key_dim: int
    """Of one head; the next, too."""
    value_dim: int
    kernel: int = 4
    """The rows that a convolution reads, its own included."""
    is_tiled: bool = False
    """Whether value head h reads key head h mod key heads; otherwise, neighbours read the same one."""
    into: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """The checkpoint's maps of queries, keys and values, and of output gates: two, or one with the rows of each key
    head together."""
    gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """The checkpoint's maps of betas, and of steps: two, or one with the rows of each key head together."""
    out: str = "linear_attn.out_proj"
    conv: str = "linear_attn.conv1d"
    decay: str = "linear_attn.A_log"
    has_log_decay: bool = True
    """Whether `decay` is log(-A); otherwise, A."""
    step_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    """The norm of each value head's output."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def history_channels(self) -> int:
        """The numbers of a row that go through the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def row_floats(self) -> int:
        """The numbers of a row that its state follows from: the convolution's, and both gates of each head."""
        return self.history_channels + 2 * self.num_value_heads

    def maps(self) -> dict[str, LinearMap]:
        key, value, heads = self.key_size, self.value_size, self.num_value_heads
        if len(self.into) == 1:
            each = (self.key_dim, self.key_dim, value // self.num_key_heads, value // self.num_key_heads)
            into: tuple[Rows, ...] = (_grouped(self.into[0], self.num_key_heads, each),)
        else:
            into = (Rows(self.into[0], (key, key, value)), Rows(self.into[1], (value,)))
        if len(self.gates) == 1:
            each_gate = (heads // self.num_key_heads,) * 2
            gates: tuple[Rows, ...] = (_grouped(self.gates[0], self.num_key_heads, each_gate),)
        else:
            gates = tuple(Rows(name, (heads,)) for name in self.gates)
        return {
            "into": LinearMap(rows=into, in_features=self.hidden_size),
            "gates": LinearMap(rows=gates, in_features=self.hidden_size, stays=True),
            "out": LinearMap(rows=(Rows(self.out, (self.hidden_size,)),), in_features=value, sums=True),
        }

    def norms(self) -> dict[str, Norm]:
        return {"gated_norm": Norm(name=self.norm, size=self.value_dim)}

    def vectors(self) -> dict[str, Vector]:
        sizes = (self.key_size, self.key_size, self.value_size)
        return {
            "conv": _taps(self.conv, sizes, self.kernel),
            "decay": Vector(self.decay, self.num_value_heads),
            "step_bias": Vector(self.step_bias, self.num_value_heads),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Mamba-2: a matrix for each head, to which each token adds the product of its input and its key.

    Keys and queries are the paper's B and C, of heads in groups; `recurrent.mamba2` is the specification.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    """The inputs of one head."""
    num_groups: int
    """The keys and queries: as many heads share each."""
    state_size: int
    """Of one key."""
    kernel: int = 4
    """The rows that a convolution reads, its own included."""
    step_limits: tuple[float, float] = (0.0, float("inf"))
    """Steps are clamped between them."""
    has_bias: bool = False
    has_conv_bias: bool = True
    into: str = "mamba.in_proj"
    """The checkpoint's map of output gates, inputs, keys, queries and steps."""
    out: str = "mamba.out_proj"
    conv: str = "mamba.conv1d"
    decay: str = "mamba.A_log"
    has_log_decay: bool = True
    """Whether `decay` is log(-A); otherwise, A."""
    step_bias: str = "mamba.dt_bias"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    """The norm of the output of the heads of each group, once it is gated."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def history_channels(self) -> int:
        """The numbers of a row that go through the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_dim

    @property
    def row_floats(self) -> int:
        """The numbers of a row that its state follows from: the convolution's, and the step of each head."""
        return self.history_channels + self.num_heads

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """The channels of inputs, keys and queries."""
        return self.inner_size, self.num_groups * self.state_size, self.num_groups * self.state_size

    def maps(self) -> dict[str, LinearMap]:
        inner, bias = self.inner_size, self.has_bias
        into = (Rows(self.into, (inner, *self.conv_sizes, self.num_heads)),)
        out = (Rows(self.out, (self.hidden_size,)),)
        return {
            "into": LinearMap(rows=into, in_features=self.hidden_size, has_bias=bias),
            "out": LinearMap(rows=out, in_features=inner, has_bias=bias, sums=True),
        }

    def norms(self) -> dict[str, Norm]:
        return {"gated_norm": Norm(name=self.norm, size=self.inner_size)}

    def vectors(self) -> dict[str, Vector]:
        heads = {"decay": self.decay, "step_bias": self.step_bias, "skip": self.skip}
        conv = {"conv": _taps(self.conv, self.conv_sizes, self.kernel)}
        if self.has_conv_bias:
            conv["conv_bias"] = _bias(self.conv, self.conv_sizes)
        return conv | {field: Vector(name, self.num_heads) for field, name in heads.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A gated convolution of few rows: C * conv(B * x), where B, C and x are linear maps of each token.

    `recurrent.short_conv` is the specification.
    """

    hidden_size: int
    channels: int
    """As many as the model is wide, or a rank's share."""
    kernel: int = 3
    """The rows that the convolution reads, its own included."""
    has_bias: bool = False
    """Of both linear maps, and of the convolution."""
    into: str = "conv.in_proj"
    """The checkpoint's map of B, C and x."""
    out: str = "conv.out_proj"
    conv: str = "conv.conv"

    @property
    def history_channels(self) -> int:
        """The numbers of a row that go through the convolution."""
        return self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return 0, 0, 0

    @property
    def row_floats(self) -> int:
        """The numbers of a row that its state follows from."""
        return self.channels

    def maps(self) -> dict[str, LinearMap]:
        into, out = (
            Rows(self.into, (self.channels,) * 3),
            Rows(self.out, (self.hidden_size,)),
        )
        bias = self.has_bias
        return {
            "into": LinearMap(rows=(into,), in_features=self.hidden_size, has_bias=bias),
            "out": LinearMap(rows=(out,), in_features=self.channels, has_bias=bias, sums=True),
        }

    def norms(self) -> dict[str, Norm]:
        return {}

    def vectors(self) -> dict[str, Vector]:
        conv = {"conv": _taps(self.conv, (self.channels,), self.kernel)}
        bias = {"conv_bias": _bias(self.conv, (self.channels,))}
        return conv | bias if self.has_bias else conv


StateMixer = GatedDelta | Mamba2 | ShortConv


def state_floats(mixer: StateMixer) -> int:
    """The numbers of the state of all heads."""
    heads, keys, values = mixer.state_shape
    return heads * keys * values


def _grouped(name: str, num_groups: int, each: tuple[int, ...]) -> Rows:
    return Rows(name, (num_groups * sum(each),), groups=Groups(num_groups, each))


def _taps(name: str, channels: tuple[int, ...], kernel: int) -> Vector:
    """The weights of a convolution."""
    return Vector(f"{name}.weight", sum(channels), each=kernel, sections=channels)


def _bias(name: str, channels: tuple[int, ...]) -> Vector:
    return Vector(f"{name}.bias", sum(channels), sections=channels)
