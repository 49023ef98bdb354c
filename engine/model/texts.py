"""The texts that a model is calibrated and measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig


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
        """The memory of their activations."""
        widest = max(
            config.hidden_size + max(config.q_size, config.intermediate_size), 2 * config.hidden_size
        )
        calibrated, held = (
            sum(len(text.token_ids) for text in texts) for texts in (self.calibration, self.held_out)
        )
        return 4 * (calibrated * widest + held * 2 * config.hidden_size)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the held-out texts; both are None if there are none."""

    before: float | None
    """Perplexity with the float weights."""
    after: float | None
