"""The texts that a model is calibrated and measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text: one sequence."""

    token_ids: list[int]
    counted: list[bool] | None = None
    """The tokens whose likelihoods count in a perplexity; None is all but the first."""


@dataclass(frozen=True, slots=True)
class Texts:
    calibration: Sequence[Text] = ()
    held_out: Sequence[Text] = ()
    """Their perplexity is measured with the float weights and with the quantized ones."""

    def num_bytes(self, config: ModelConfig) -> int:
        """The memory of their activations, at the widest part of a layer."""
        between = 2 * (config.hidden_size + config.kv_size)
        inside = max(3 * (config.q_size + config.kv_size), config.hidden_size + config.intermediate_size)
        calibrated, held = (
            sum(len(text.token_ids) for text in texts) for texts in (self.calibration, self.held_out)
        )
        return 4 * (calibrated * (between + inside) + held * between)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The perplexities of the held-out texts; both are None if there are none."""

    before: float | None
    """Perplexity with the float weights."""
    after: float | None
