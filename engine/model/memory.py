"""Says before anything is loaded whether it fits, and how many KV blocks there is room for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from engine.errors import NotEnoughMemory
from engine.kv.cache import KVShape
from engine.model.config import LoadOptions, ModelConfig
from engine.model.weights import expected_shapes

GIB = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


SMALLEST_CONTEXT = 1024
"""Tokens; a model that is to have less room than this is better not started."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    weights: torch.dtype
    kv: torch.dtype


@dataclass(frozen=True, slots=True)
class Budget:
    """What there is, and how much of what the weights leave may become KV cache."""

    available: int
    share: float
    cap: int | None = None

    def kv_limit(self, left: int) -> int:
        limit = max(0, int(left * self.share))
        return limit if self.cap is None else min(limit, self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All in bytes."""

    weights: int
    workspace: int
    """Activations and logits of the largest step."""
    block: int
    num_blocks: int
    block_size: int
    """Tokens, not bytes."""
    available: int

    @property
    def kv(self) -> int:
        return self.block * self.num_blocks

    @property
    def num_tokens(self) -> int:
        """That the KV cache holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def text(self) -> str:
        """One line for the operator."""
        return (
            f"weights {_size(self.weights)}, KV cache {_size(self.kv)} ({self.num_tokens} tokens), "
            f"workspace {_size(self.workspace)}, of {_size(self.available)} available"
        )


def plan_memory(
    config: ModelConfig, shape: KVShape, dtypes: Dtypes, options: LoadOptions, budget: Budget
) -> MemoryPlan:
    """How much goes where.

    A pool that is smaller than the longest sequence is fine (the scheduler then allows shorter ones only), down to
    `SMALLEST_CONTEXT` tokens.

    Raises:
        NotEnoughMemory: weights and KV cache do not fit; the message has the numbers.
    """
    weights = weight_bytes(config, dtypes.weights)
    workspace = _workspace_bytes(config, options)
    block = shape.block_bytes(dtypes.kv)
    left = budget.available - weights - workspace
    plan = MemoryPlan(
        weights=weights,
        workspace=workspace,
        block=block,
        num_blocks=options.num_blocks or _num_blocks(config, shape, options, block, budget.kv_limit(left)),
        block_size=shape.block_size,
        available=budget.available,
    )
    if plan.kv > left:
        raise NotEnoughMemory(f"not enough memory: {plan.text}")
    return plan


def _num_blocks(config: ModelConfig, shape: KVShape, options: LoadOptions, block: int, kv_limit: int) -> int:
    """As many as the limit holds, between the smallest useful number and the largest that could ever be in use."""
    max_model_len = options.max_model_len or config.max_position
    per_sequence = -(-max_model_len // shape.block_size)
    smallest = 1 + -(-min(max_model_len, SMALLEST_CONTEXT) // shape.block_size)
    limit = kv_limit if options.kv_bytes is None else options.kv_bytes
    return max(smallest, min(limit // block, 1 + per_sequence * options.max_num_seqs))


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of all tensors, in `dtype`."""
    return sum(prod(shape) for shape in expected_shapes(config).values()) * dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """What can be taken now without taking it from somebody: of the device, or of this machine and this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([_free_in_machine(), *_free_in_cgroups()])


def budget(device: torch.device) -> Budget:
    """A GPU is there for this model alone; a CPU's memory is not."""
    available = available_bytes(device)
    return Budget(available, 0.9) if device.type == "cuda" else Budget(available, 0.25, 4 * GIB)


def _workspace_bytes(config: ModelConfig, options: LoadOptions) -> int:
    per_token = (
        4 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 3 * config.intermediate_size
    )
    rows = min(options.max_num_seqs, options.max_batch_tokens)
    return 4 * (options.max_batch_tokens * per_token + 3 * rows * config.vocab_size)


def _free_in_machine() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_cgroups() -> Iterator[int]:
    """Limit less use, of cgroup v2 and v1; file cache that the kernel would give up does not count as used."""
    for folder, limit, used, cache in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = (folder / limit).read_text(encoding="ascii").strip()
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            reclaimable = next((int(line.split()[1]) for line in stat if line.startswith(cache + " ")), 0)
            if bound.isdigit():
                yield int(bound) - int((folder / used).read_text(encoding="ascii")) + reclaimable
        except OSError:
            continue


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
