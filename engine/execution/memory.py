"""Says before anything is loaded whether a model fits, and how many KV blocks there is room for.

On a GPU the answer is given twice: from the sizes of the weights before they are loaded, and once weights and tables
are there from what they and the largest steps really took (`measure_steps`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.errors import NotEnoughMemory
from engine.kernels.batch import Batch, blank_batch
from engine.kernels.cpu.native import PACKED, NativeUnavailable
from engine.kernels.kv_cache import KVLayout
from engine.kernels.ops import Kernels, reference_kernels
from engine.kernels.select import check_native
from engine.model.config import LoadOptions, ModelConfig
from engine.model.dtype import choose_device, choose_dtype, choose_kv_dtype, kv_dtype_name
from engine.model.eagle import EagleConfig
from engine.model.eagle_weights import eagle_specs
from engine.model.tensors import (
    AS_IT_IS,
    LinearSpec,
    Recipe,
    check_recipe,
    embedding_spec,
    head_spec,
    linear_specs,
    make_recipe,
    packs_embedding,
)
from engine.planning.windows import Windows
from engine.quant.formats import DENSE, Format
from engine.quant.integers import Integers
from engine.sizes import GIB, size_text

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


SMALLEST_CONTEXT = 1024
"""The fewest tokens of KV cache that a model is started with, if it has so many positions."""


GRAPH_BYTES = 1 << 20
"""About what one captured graph keeps on the device beside the memory that all of them share: an estimate."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's memory as its driver tells it, in bytes."""

    total: int
    free: int
    allocated: int = 0
    """What torch has allocated in this process."""

    @property
    def used(self) -> int:
        """What is in use, by whoever it is: other processes, and this one's CUDA context."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that may be used, and the share of what the weights leave that may become KV cache."""

    available: int
    share: float
    cap: int | None = None
    card: Card | None = None
    """The GPU as it was when nothing was loaded; None if the budget is of the machine's own memory."""

    def kv_limit(self, left: int) -> int:
        limit = max(0, int(left * self.share))
        return limit if self.cap is None else min(limit, self.cap)


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a draft model takes, in bytes."""

    weights: int
    block: int
    """Its part of each KV block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a model took on a GPU, in bytes."""

    resident: int
    """Weights, and the tables of the running sequences."""
    workspace: int
    """Activations and logits of the largest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What goes where, in bytes."""

    weights: int
    draft: int = 0
    """Weights of the draft model."""
    workspace: int
    """Activations and logits of the largest step."""
    graphs: int = 0
    """An estimate of what captured steps will take: the one size that is not known before it is taken."""
    tables: int = 0
    """On a GPU, what steps keep of the running sequences."""
    block: int
    """A KV block, of the model and its draft together."""
    num_blocks: int
    windows: Windows
    """The block tables of every sequence."""
    chunk: int
    """The most tokens that a step computes of a sequence."""
    available: int
    card: Card | None = None
    """The card of the budget."""

    @property
    def kv(self) -> int:
        return self.block * self.num_blocks

    @property
    def num_tokens(self) -> int:
        """The tokens that the KV cache holds."""
        return self.windows.room(self.num_blocks - 1, self.chunk)

    @property
    def needed(self) -> int:
        """The bytes of all of it."""
        return self.weights + self.draft + self.workspace + self.tables + self.graphs + self.kv

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def text(self) -> str:
        """One line for the operator."""
        found_later = (("tables", self.tables), ("graphs", self.graphs))
        kept = [
            f"weights {size_text(self.weights)}",
            *([f"draft {size_text(self.draft)}"] if self.draft else []),
            f"KV cache {size_text(self.kv)} ({self.num_tokens} tokens)",
            f"workspace {size_text(self.workspace)}",
            *(f"{name} {size_text(size)}" for name, size in found_later if size),
        ]
        card = self.card
        whole = f" (of the GPU's {size_text(card.total)}, {size_text(card.used)} in use)" if card else ""
        return f"{', '.join(kept)}, of {size_text(self.available)} available{whole}"

    @property
    def rows(self) -> list[tuple[str, int, str]]:
        """All of a GPU's memory, and what is to become of it: name, bytes, note. The last row is the sum of the others.

        What is in use before includes the workspace of the kernels, which is there as soon as these are.
        """
        assert self.card is not None
        return [
            ("in use before", self.card.used, ""),
            ("weights", self.weights, ""),
            ("activations", self.workspace, ""),
            ("tables", self.tables, "of the running sequences"),
            ("graphs", self.graphs, "about"),
            ("KV cache", self.kv, f"{self.num_tokens} tokens in {self.num_blocks} blocks"),
            ("free", self.card.free - self.needed, ""),
            ("in all", self.card.total, ""),
        ]

    @property
    def table(self) -> list[str]:
        """The rows as lines for the operator."""
        return [
            f"GPU memory  {name:<13} {size_text(size):>10}  {note}".rstrip() for name, size, note in self.rows
        ]

    def graphs_text(self, num_graphs: int, num_bytes: int, in_use: int) -> str:
        """One line for the operator, once steps are captured.

        Args:
            num_bytes: that they took.
            in_use: of the card, by all and everything.
        """
        free = "" if self.card is None else f"; free are {size_text(self.card.total - in_use)}"
        need = "" if self.card is None else f", of which the largest step takes {size_text(self.workspace)}"
        planned = f"about {size_text(self.graphs)} were planned"
        return f"{num_graphs} CUDA graphs took {size_text(num_bytes)}, {planned}{free}{need}"


def plan_memory(
    config: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    budget: Budget,
    measured: Measured | None = None,
    recipe: Recipe = AS_IT_IS,
    draft: DraftSize | None = None,
) -> MemoryPlan:
    """Decides how much memory goes where.

    A pool that is smaller than the longest sequence is fine (the scheduler then allows shorter ones only), down to
    `SMALLEST_CONTEXT` tokens.

    Args:
        measured: what the model took, once it is there; until then the sizes of its tensors serve.
        draft: of the draft model, if there is one.

    Raises:
        NotEnoughMemory: weights and KV cache do not fit; the message has the numbers.
    """
    plan = draft_plan(config, kernels, options, budget, measured, recipe, draft)
    if not plan.fits:
        raise NotEnoughMemory(f"not enough memory: {plan.text}")
    return plan


def draft_plan(
    config: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    budget: Budget,
    measured: Measured | None = None,
    recipe: Recipe = AS_IT_IS,
    draft: DraftSize | None = None,
) -> MemoryPlan:
    """The plan of `plan_memory`, which may need more than there is."""
    layout = KVLayout.of(config, options.block_size)
    windows = Windows(layout.windows, options.block_size)
    dtype = kernels.embedding_dtype
    weights = weight_bytes(config, dtype, recipe, kernels.packs, keeps_narrow=kernels.keeps_narrow)
    workspace = measured.workspace if measured else _workspace_bytes(config, options)
    tables = max(0, measured.resident - weights) if measured else 0
    graphs = _graph_bytes(options, workspace) if budget.card is not None and options.cuda_graphs else 0
    draft = draft or DraftSize(0, 0)
    block = layout.block_bytes(kernels.kv_dtype) + draft.block
    left = budget.available - weights - draft.weights - tables - workspace - graphs
    return MemoryPlan(
        weights=weights,
        draft=draft.weights,
        workspace=workspace,
        graphs=graphs,
        tables=tables,
        block=block,
        num_blocks=options.num_blocks or _num_blocks(config, windows, options, block, budget.kv_limit(left)),
        windows=windows,
        chunk=options.max_batch_tokens,
        available=budget.available,
        card=budget.card,
    )


def _num_blocks(
    config: ModelConfig, windows: Windows, options: LoadOptions, block: int, kv_limit: int
) -> int:
    """The KV blocks that the limit holds: the smallest useful number at least, and no more than could be used."""
    max_model_len = options.max_model_len or config.max_position
    per_sequence = windows.num_tables * -(-max_model_len // windows.block_size)
    smallest = 1 + windows.num_tables * -(-min(max_model_len, SMALLEST_CONTEXT) // windows.block_size)
    limit = kv_limit if options.kv_bytes is None else options.kv_bytes
    return max(smallest, min(limit // block, 1 + per_sequence * options.max_num_seqs))


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    recipe: Recipe = AS_IT_IS,
    packs: tuple[type[Format], ...] = (Integers,),
    *,
    keeps_narrow: bool = False,
) -> int:
    """The bytes of all weights of a model.

    Args:
        dtype: the type of those in floating point.
        packs: the formats that the kernels keep as they are; they unpack the others. See `Kernels.packs`.
        keeps_narrow: see `Kernels.keeps_narrow`.
    """
    packed = partial(linear_bytes, dtype=dtype, packs=packs, keeps_narrow=keeps_narrow)
    norms = sum(norm.size for _, norm in config.spec.norms())
    head, embedding = head_spec(config, recipe), embedding_spec(config, recipe)
    is_packed = keeps_narrow and packs_embedding(config, recipe)
    num_dense = config.vocab_rows * config.hidden_size * dtype.itemsize
    total = norms * dtype.itemsize + (packed(embedding) if is_packed else num_dense)
    if not (config.spec.ties_embeddings and (is_packed or head.format == DENSE)):
        total += packed(head)
    for layer in range(config.num_layers):
        total += sum(packed(spec) for spec in linear_specs(config, layer, recipe).values())
    return total


def linear_bytes(
    spec: LinearSpec, dtype: torch.dtype, packs: tuple[type[Format], ...], *, keeps_narrow: bool = False
) -> int:
    """The bytes of one linear map; see `weight_bytes`."""
    format = spec.format if isinstance(spec.format, packs) else DENSE
    if isinstance(format, Integers) and not keeps_narrow:
        format = format.widened
    bias = spec.out_features * dtype.itemsize if spec.bias else 0
    return format.num_bytes(spec.out_features, spec.in_features, dtype) + bias


def eagle_bytes(
    head: EagleConfig, kernels: Kernels, recipe: Recipe = AS_IT_IS, *, with_embedding: bool
) -> int:
    """The bytes of all weights of an EAGLE-3 head.

    Args:
        with_embedding: whether it has an embedding of its own.
    """
    config, dtype = head.layer, kernels.embedding_dtype
    num_loose = config.hidden_size + sum(norm.size for _, norm in config.spec.norms())
    if with_embedding:
        num_loose += config.vocab_size * config.hidden_size
    linears = eagle_specs(head, recipe).values()
    return num_loose * dtype.itemsize + sum(linear_bytes(spec, dtype, kernels.packs) for spec in linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a model would take on its device, and the types that follow from its options."""

    dtype: str
    kv_dtype: str
    plan: MemoryPlan
    """It may need more than there is."""
    max_model_len: int
    """The tokens of the longest sequence that would be served."""
    max_num_seqs: int

    @property
    def weights(self) -> int:
        return self.plan.weights

    @property
    def kv_of_a_token(self) -> float:
        """The bytes that the cache grows by with every token of a sequence that is longer than all windows."""
        windows = self.plan.windows
        return self.plan.block * (windows.num_unbounded or windows.num_tables) / windows.block_size

    def num_streams(self, context: int) -> int:
        """The sequences of so many tokens that can run at the same time; 0 if the plan does not fit."""
        if not self.plan.fits:
            return 0
        return min(self.max_num_seqs, (self.plan.num_blocks - 1) // self.plan.windows.num_held(context, 1))


def estimate(
    config: ModelConfig, options: LoadOptions, limits: Budget | None = None, *, has_native: bool = True
) -> Estimate:
    """The sizes of a model that nothing was loaded of.

    Args:
        limits: the budget of the device, which is asked for it if there is none.
        has_native: whether there are native kernels; without them, a CPU computes in float32.

    Raises:
        CheckpointError: the model cannot be served in the types that are asked for.
    """
    device = choose_device(options.device)
    options = options.for_device(device.type)
    dtype = choose_dtype(options.dtype, config, device)
    is_native = has_native and _is_native(config, options)
    kernels = reference_kernels(device, dtype, dtype if is_native else torch.float32)
    packs_on_cpu = is_native and device.type == "cpu"
    kernels = replace(
        kernels,
        kv_dtype=choose_kv_dtype(options.kv_dtype, kernels.kv_dtype, device),
        packs=PACKED if packs_on_cpu else kernels.packs,
        keeps_narrow=packs_on_cpu,
    )
    recipe = make_recipe(config, options)
    check_recipe(config, recipe)
    plan = draft_plan(config, kernels, options, limits or budget(device, options), recipe=recipe)
    wanted = options.max_model_len or config.max_position
    return Estimate(
        dtype=str(kernels.embedding_dtype).removeprefix("torch."),
        kv_dtype=kv_dtype_name(kernels.kv_dtype),
        plan=plan,
        max_model_len=wanted if config.context_window else min(wanted, plan.num_tokens),
        max_num_seqs=options.max_num_seqs,
    )


def _is_native(config: ModelConfig, options: LoadOptions) -> bool:
    try:
        check_native(config, options)
    except NativeUnavailable:
        return False
    return True


def available_bytes() -> int:
    """The memory of this machine and this container that can be taken now without taking it from somebody."""
    return min([_free_in_machine(), *_free_in_cgroups()])


def budget(device: torch.device, options: LoadOptions) -> Budget:
    """The budget of a device: the operator's share of a GPU, all of which may become KV cache, or a quarter of what a
    machine has free."""
    if device.type == "cuda":
        return card_budget(read_card(device), options.gpu_memory_utilization)
    return Budget(available_bytes(), 0.25, 4 * GIB)


def read_card(device: torch.device) -> Card:
    free, total = torch.cuda.mem_get_info(device)
    return Card(total=total, free=free, allocated=torch.cuda.memory_allocated(device))


def card_budget(card: Card, utilization: float) -> Budget:
    """The budget of a GPU: what is left of the share `utilization`; what the model does not need becomes KV cache."""
    return Budget(available=max(0, int(card.total * utilization) - card.used), share=1.0, card=card)


def largest_batches(options: LoadOptions, max_model_len: int, num_tables: int) -> Iterator[Batch]:
    """The steps that need the most memory beside the KV cache, all of it in block 0, which belongs to nobody.

    As many tokens as a step may have: of as many sequences as there may be, with as many rows of logits; and at the end
    of one sequence as long as there may be.
    """
    num_sequences = min(options.max_num_seqs, options.max_batch_tokens)
    each, more = divmod(options.max_batch_tokens, num_sequences)
    lengths = [min(each + (i < more), max_model_len) for i in range(num_sequences)]
    for num_tokens, contexts, num_rows in (
        (lengths, lengths, min(options.max_rows, sum(lengths))),
        ([min(options.max_batch_tokens, max_model_len)], [max_model_len], 1),
    ):
        num_blocks = num_tables * -(-max(contexts) // options.block_size)
        tables = torch.zeros((len(contexts), num_blocks), dtype=torch.int32)
        batch = blank_batch(num_tokens, contexts, tables)
        yield replace(batch, sample_rows=torch.arange(num_rows, dtype=torch.int32))


def measure_steps(device: torch.device, before: Card, steps: Callable[[], None]) -> Measured:
    """Runs steps on a GPU that has the weights and nothing else yet.

    Args:
        before: the card before the weights. What it lost since counts, whoever took it: torch, its libraries, the
            driver for the code of kernels.

    Raises:
        NotEnoughMemory: the steps do not fit beside the weights.
    """
    torch.cuda.empty_cache()
    resident = torch.cuda.memory_allocated(device) - before.allocated
    try:
        steps()
    except torch.OutOfMemoryError:
        raise NotEnoughMemory(
            f"not enough memory: weights and tables {size_text(resident)}, and the largest step does not fit beside "
            "them; lower --max-batch-tokens or --max-num-seqs"
        ) from None
    torch.cuda.synchronize(device)
    after = read_card(device)
    torch.cuda.empty_cache()
    return Measured(resident=resident, workspace=max(0, before.free - after.free - resident))


def _workspace_bytes(config: ModelConfig, options: LoadOptions) -> int:
    """Activations of the largest step and its logits, as if all were float32."""
    per_token = (
        4 * config.hidden_size + 2 * (config.q_size + 2 * config.kv_size) + 3 * config.intermediate_size
    )
    return 4 * (options.max_batch_tokens * per_token + 3 * options.max_rows * config.vocab_size)


def _graph_bytes(options: LoadOptions, workspace: int) -> int:
    """Graphs share the memory of the largest captured step, a part of the largest step's; each keeps its launches."""
    largest = min(1.0, 1024 / options.max_batch_tokens)
    num_graphs = options.max_num_seqs // 8 + 64 + 4 * options.max_drafts
    return int(workspace * largest) + num_graphs * GRAPH_BYTES


def _free_in_machine() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_cgroups() -> Iterator[int]:
    """The limit of a container less what it uses, by cgroup v2 and v1, without the file cache that can be given up."""
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
