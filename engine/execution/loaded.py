"""A model on its device, and the data of its steps there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution.buffers import StepBuffers
from penstock.engine.execution.expert_counts import ExpertCounts
from penstock.engine.execution.memory import MemoryPlan
from penstock.engine.kernels.kv_cache import KVCache
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.ranks import World
from penstock.engine.kernels.sequence_table import SequenceTable
from penstock.engine.kernels.state_cache import StateCache
from penstock.engine.program.decoders import ForwardPass
from penstock.engine.program.native_drafts import NativeDraft
from penstock.engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and all that its steps keep there."""

    config: ModelConfig
    options: LoadOptions
    device: torch.device
    kernels: Kernels
    max_model_len: int
    """Tokens of the longest sequence."""
    decoder: ForwardPass
    lm_head: Linear
    """Makes rows of logits; with ranks, those of this rank's tokens, see `whole`; see `Weights.lm_head` for stages."""
    kv: KVCache
    table: SequenceTable
    sampler: Sampler
    buffers: StepBuffers | None
    """None if no steps are captured."""
    memory: MemoryPlan
    states: StateCache | None = None
    """None if no layer has a state."""
    expert_counts: ExpertCounts | None = None
    features: Tensor | None = None
    """[blocks, block size, width], the features of its tokens that it keeps for a head: see `Op.rows`."""
    draft: LoadedModel | None = None
    """Its draft model. The two have blocks of the same numbers, and one table of the running sequences, sampler and
    buffers."""
    reads_target: bool = False
    """Whether it is a head. Its target's features of a token, which it reads, are better than its own."""
    chain: LoadedModel | None = None
    """The passes of a head after the first one, which go on from its own hidden states, with one token a sequence."""
    world: World | None = None
    """The processes that run the model together, of which this is the part of one; None if it is whole."""
    is_chain: bool = False
    """Whether it is these passes."""
    native: NativeDraft | None = None
    """Of a draft model: all its passes in one call, which needs the target's numbers of tokens."""

    def whole(self, logits: Tensor) -> Tensor:
        """[R, vocab] of rows of logits that `lm_head` made; see `Kernels.whole`."""
        return self.kernels.whole(logits, self.config.vocab_size)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies all that belongs to the tokens of these blocks; a draft model's KV of a copy counts as lost."""
        self.kv.copy_blocks(sources, targets)
        if self.features is not None:
            self.features[targets.long()] = self.features[sources.long()]
