"""The dense feed-forward part of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.spec.maps import LinearMap, Norm, Rows, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """down(activation(gate) * up), or down(activation(up)) where there is no gate."""

    hidden_size: int
    inner_size: int
    activation: str = "silu"
    """One of ACTIVATIONS."""
    is_gated: bool = True
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The checkpoint's maps of gates and ups: two, or one with all rows; without gates, ups alone."""
    down: str = "mlp.down_proj"
    has_bias: bool = False

    def maps(self) -> dict[str, LinearMap]:
        inner = self.inner_size
        if self.is_gated and len(self.gate_up) == 1:
            rows: tuple[Rows, ...] = (Rows(self.gate_up[0], (inner, inner)),)
        else:
            rows = tuple(Rows(name, (inner,)) for name in self.gate_up)
        return {
            "gate_up": LinearMap(
                rows=rows, in_features=self.hidden_size, has_bias=self.has_bias, is_gated=self.is_gated
            ),
            "down": LinearMap(
                rows=(Rows(self.down, (self.hidden_size,)),),
                in_features=inner,
                has_bias=self.has_bias,
                sums=True,
            ),
        }

    def norms(self) -> dict[str, Norm]:
        return {}

    def vectors(self) -> dict[str, Vector]:
        return {}

    @property
    def numbers_per_token(self) -> int:
        """The activations that a token has between its linear maps."""
        return 2 * self.hidden_size + (3 if self.is_gated else 2) * self.inner_size


ACTIVATIONS = ("silu", "gelu_tanh", "relu2", "gelu")
"""relu2 without a gate."""
