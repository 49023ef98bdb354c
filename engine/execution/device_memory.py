"""What the steps of a model keep on a GPU as long as it is loaded, in bytes, known before any of it is taken.

The owners are made on torch's meta device, where tensors have sizes and no memory: by the very code that allocates.
"""

from __future__ import annotations

import torch

from engine.execution.slot_table import SlotTable, StepBuffers
from engine.kernels.ops import Kernels
from engine.model.config import LoadOptions, ModelConfig
from engine.sampling.device import DeviceSampler

_META = torch.device("meta")


def table_bytes(config: ModelConfig, options: LoadOptions, kernels: Kernels, max_len: int) -> int:
    """Of what `DeviceSteps` allocates. What a kernel table keeps for itself is there before, and is not in it.

    Args:
        max_len: tokens of the longest sequence that the KV cache holds.
    """
    num_slots, vocab_size = options.max_num_seqs, config.vocab_size
    max_blocks = -(-max_len // options.block_size)
    return (
        DeviceSampler(num_slots, vocab_size, (), _META).tables.num_bytes
        + SlotTable(num_slots, max_blocks, options.max_query_len, _META).num_bytes
        + StepBuffers.empty(num_slots, vocab_size, kernels.activation_dtype, _META).num_bytes
        + kernels.make_choose(num_slots, vocab_size, _META).num_bytes
    )
