"""The description of a checkpoint in EAGLE-3's format: a head that drafts from the hidden states of its target.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up inference acceleration of large language models via training-time test",
2025. The head is one layer of a Llama. It reads the token that it goes on from together with the target's features
before that token: hidden states after three of its layers, fused by one linear map. Its logits cover a part of the
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.gguf.container import is_gguf
from penstock.engine.model.parse import parse_config

NUM_TAPS = 3
"""The layers of the target after which a head reads hidden states."""

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head, and the facts that it needs about its target."""

    layer: ModelConfig
    """The head as a model of one layer; the vocabulary is the target's."""
    num_drafted: int
    """The tokens that it has logits of."""
    target_hidden_size: int
    taps: tuple[int, ...]
    """The layers of the target that are done where a hidden state is read; empty if the checkpoint does not say."""
    residual_is_normed: bool
    """Whether the residual of its layer is the norm of the target's features, and not the features themselves."""

    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """So many layers of the target are done where its hidden states are read."""
        num = target.num_layers
        return self.taps or (2, num // 2, num - 3)


def is_eagle(path: Path) -> bool:
    """Returns whether a checkpoint is such a head.

    Raises:
        CheckpointError: config.json is missing or malformed.
    """
    if is_gguf(path):
        return False
    fields = Fields.read(path / "config.json")
    return fields.has("draft_vocab_size") or not {*_ARCHITECTURES}.isdisjoint(fields.strings("architectures"))


def read_eagle(folder: Path) -> EagleConfig:
    """Reads config.json as the paper's authors, SGLang, vLLM and `speculators` write it.

    Raises:
        CheckpointError: names the entry that is missing, malformed or not supported.
    """
    fields = Fields.read(folder / "config.json")
    name = "transformer_layer_config"
    of_layer = fields.nested(name) if fields.has(name) else fields  # `speculators` nests it
    if of_layer.text("model_type", "llama") != "llama":
        raise of_layer.error(
            f"model_type {of_layer.text('model_type')} is not supported in a head; only llama is"
        )
    layer = parse_config(of_layer, "LlamaForCausalLM")
    if layer.num_layers != 1:
        raise of_layer.error(f"num_hidden_layers is {layer.num_layers}, and a head has one layer")
    return EagleConfig(
        layer=layer,
        num_drafted=fields.size("draft_vocab_size", layer.vocab_size, most=layer.vocab_size),
        target_hidden_size=fields.size("target_hidden_size", layer.hidden_size),
        taps=_taps(fields),
        residual_is_normed=fields.flag("norm_before_residual", of_layer is not fields),
    )


def check_eagle(target: ModelConfig, head: EagleConfig) -> None:
    """Checks that a head was made for a model of these sizes.

    Raises:
        CheckpointError: it was not; the message says why.
    """
    if target.context_window:
        raise CheckpointError(
            f"the model forgets all but {target.context_window} tokens, and a head would need them"
        )
    if head.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the head reads hidden states of {head.target_hidden_size} numbers, and those of the model have "
            f"{target.hidden_size}: it was made for another model"
        )
    if head.layer.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head knows {head.layer.vocab_size} tokens, and the model {target.vocab_size}: it was made for "
            "another model"
        )
    for tap in head.taps_of(target):
        if not 0 <= tap < target.num_layers:
            raise CheckpointError(
                f"the head reads hidden states after {tap} layers, and the model has {target.num_layers}, of which "
                "the last cannot be read"
            )
        if tap > target.spec.last_with_keys:
            raise CheckpointError(
                f"the head reads hidden states after {tap} layers, and the model computes those of all tokens up to "
                f"layer {target.spec.last_with_keys} only"
            )


def _taps(fields: Fields) -> tuple[int, ...]:
    """vLLM counts the layers that are done; SGLang's `eagle_config` has the number of the last of them."""
    nested = fields.nested("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.error("a head that does not use_aux_hidden_state is not supported")
    taps = fields.integers(_TAPS) or tuple(number + 1 for number in nested.integers(_TAPS))
    if len(taps) not in (0, NUM_TAPS):
        raise fields.error(f"{_TAPS} has {len(taps)} entries, and {NUM_TAPS} are read")
    return taps
