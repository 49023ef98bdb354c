"""Experts: feed-forward parts of which a router chooses some for each token."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.spec.feed_forward import Mlp
from penstock.engine.spec.maps import LinearMap, Norm, Rows, Vector

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")
EXPERT_ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses experts for each token, and weighs them; `reference.route` is its specification."""

    num_experts: int
    top_k: int
    """The experts that each token has."""
    scoring: str = "softmax"
    """The way logits become scores, one of SCORINGS: softmax over all logits, softmax over the chosen experts' alone,
    or the sigmoid of each."""
    num_groups: int = 1
    """Experts lie in so many groups of neighbours; only the best `top_groups` of them can be chosen from."""
    top_groups: int = 1
    group_best: int = 1
    """The score of a group is the sum of its so many best experts."""
    renormalizes: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    epsilon: float = 0.0
    """Is added to that sum."""
    scale: float = 1.0
    """Weights are multiplied by it, after they are renormalized."""
    weighs_inputs: bool = False
    """Whether the weight multiplies the input of an expert, not its output."""
    name: str = "mlp.gate"
    """The checkpoint's linear map from hidden states to logits."""
    has_bias: bool = False
    choice_bias: str = ""
    """The name of a tensor [experts] that is added to scores for the choice alone; "" is none."""
    expert_scale: str = ""
    """The name of a tensor [experts]: the weight of each expert is multiplied by it in the end; "" is none."""
    norm: Norm | None = None
    """The norm of the router's input, where the experts read something else."""

    def map(self, hidden_size: int) -> LinearMap:
        rows = (Rows(self.name, (self.num_experts,)),)
        return LinearMap(rows=rows, in_features=hidden_size, has_bias=self.has_bias, stays=True)

    def vectors(self) -> dict[str, Vector]:
        named = {"choice_bias": self.choice_bias, "expert_scale": self.expert_scale}
        return {field: Vector(name, self.num_experts) for field, name in named.items() if name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The activation between the two linear maps of an expert; `reference.activate` is its specification.

    Gated, it is f(min(gate, limit)) * (clamp(up, -limit, limit) + shift); otherwise, f(up).
    """

    kind: str = "silu"
    """f, one of EXPERT_ACTIVATIONS: "silu" is x * sigmoid(alpha * x), "gelu_tanh" is the approximation of "gelu" with
    tanh, "relu2" is relu(x)^2."""
    is_gated: bool = True
    limit: float = 0.0
    """0 is none."""
    alpha: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Stack:
    """One tensor of a checkpoint with the rows of all experts: [experts, rows, in]."""

    name: str
    """The name in the layer. The suffix on disk, such as "", ".weight", "_bias" or "_scales", says which of an expert's
    tensors it stacks."""
    maps: tuple[str, ...]
    """The linear maps of an expert whose rows it has, as many of each."""
    is_interleaved: bool = False
    """Whether the rows of these maps alternate; otherwise all rows of the first come first."""
    is_transposed: bool = False
    """Whether its weights are [experts, in, rows]."""


def default_stacks(prefix: str) -> tuple[Stack, ...]:
    """Returns the stacks that transformers writes, or those in GGUF files, which keep gates and ups apart."""
    single = (Stack(f"{prefix}.{name}", (name,)) for name in ("gate_proj", "up_proj", "down_proj"))
    return (Stack(f"{prefix}.gate_up_proj", ("gate_proj", "up_proj")), *single)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The sum of a token's experts, each with the weight that the router gives it, and of shared ones.

    An expert is down(activation(gate_up(x))). A checkpoint has the tensors of expert 7, say, one by one as
    `{prefix}.7.{name}.weight`, or all experts' stacked; either way, they are read one by one, by these names
    (`stacks.unstacked`).
    """

    hidden_size: int
    inner_size: int
    """Of one expert."""
    router: Router
    activation: Activation = Activation()
    has_bias: bool = False
    prefix: str = "mlp.experts"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The linear maps of an expert whose rows are fused: gates, then ups; one alone where there are no gates."""
    down: str = "down_proj"
    stacks: tuple[Stack, ...] = default_stacks("mlp.experts")
    """The forms in which a checkpoint may have the tensors of all experts in one."""
    first: int = 0
    """The first expert that this rank has."""
    num_own: int | None = None
    """The experts that this rank has, each of them whole; None is all of them, or this rank's rows of all."""
    norm: Norm | None = None
    """The norm of the experts' input, and next, of their sum."""
    out_norm: Norm | None = None
    shared: Mlp | None = None
    """The shared experts, as one part that every token has."""
    shared_gate: str = ""
    """The name of a linear map to one number, whose sigmoid multiplies the output of shared experts; "" is none."""
    shared_norm: Norm | None = None
    """The norm of the shared experts' input, and next, of their output."""
    shared_out_norm: Norm | None = None

    @property
    def own(self) -> range:
        """The numbers of the experts that this rank has."""
        count = self.router.num_experts if self.num_own is None else self.num_own
        return range(self.first, self.first + count)

    def maps(self) -> dict[str, LinearMap]:
        """Returns the linear maps; expert 7 has `experts.7.gate_up` and `experts.7.down`."""
        own = {"router": self.router.map(self.hidden_size)}
        if self.shared is not None:
            own |= {f"shared_{field}": map for field, map in self.shared.maps().items()}
        if self.shared_gate:
            rows = (Rows(self.shared_gate, (1,)),)
            own["shared_gate"] = LinearMap(rows=rows, in_features=self.hidden_size, stays=True)
        for number in self.own:
            own |= {
                expert_field(number, field): map
                for field, map in self._maps(f"{self.prefix}.{number}").items()
            }
        return own

    def _maps(self, expert: str) -> dict[str, LinearMap]:
        rows = tuple(Rows(f"{expert}.{name}", (self.inner_size,)) for name in self.gate_up)
        down = (Rows(f"{expert}.{self.down}", (self.hidden_size,)),)
        return {
            "gate_up": LinearMap(
                rows=rows,
                in_features=self.hidden_size,
                has_bias=self.has_bias,
                is_gated=self.activation.is_gated,
            ),
            "down": LinearMap(
                rows=down,
                in_features=self.inner_size,
                has_bias=self.has_bias,
                sums=self.num_own is None,
            ),
        }

    def norms(self) -> dict[str, Norm]:
        named = {
            "router_norm": self.router.norm,
            "experts_norm": self.norm,
            "experts_out_norm": self.out_norm,
            "shared_norm": self.shared_norm,
            "shared_out_norm": self.shared_out_norm,
        }
        return {field: norm for field, norm in named.items() if norm is not None}

    def vectors(self) -> dict[str, Vector]:
        return self.router.vectors()

    @property
    def numbers_per_token(self) -> int:
        """The activations that a token has between the linear maps of its experts and of shared ones."""
        chosen = 2 * self.hidden_size + (1 + len(self.gate_up)) * self.inner_size
        shared = 0 if self.shared is None else self.shared.numbers_per_token
        return self.router.num_experts + self.router.top_k * chosen + shared


def expert_field(number: int, field: str) -> str:
    """Returns the key of an expert's linear map among a layer's."""
    return f"experts.{number}.{field}"
