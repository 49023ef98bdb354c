"""The memory of a model: the sum of bytes over its description, and the part of a device that is left for the KV cache.

On a GPU the plan is made twice: from the sizes of the weights before they are loaded, and, once weights and tables are
there, from the bytes that they and the largest steps really took (`measure_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError, MemoryHeld, NotEnoughMemory
from penstock.engine.free_memory import available_bytes
from penstock.engine.kernels.kv_cache import KVLayout
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.state_cache import StateLayout
from penstock.engine.model.tensors import (
    AS_IT_IS,
    LinearSpec,
    Recipe,
    embedding_spec,
    head_spec,
    layer_embeddings_spec,
    layer_table_spec,
    linear_specs,
    make_recipe,
    packs_embedding,
    with_one_expert,
)
from penstock.engine.planning.windows import Windows
from penstock.engine.quant.formats import DENSE
from penstock.engine.quant.integers import Integers
from penstock.engine.sizes import GIB, size_text
from penstock.engine.spec import Experts, LayerEmbedding, Mixer, Router

CAPTURED_TOKENS = 1024
"""Steps of no more tokens have a graph on every model."""
_MOST_CAPTURED_TOKENS, _LAUNCHED_PRODUCTS = 4096, 10**11
"""The tokens of the largest graph, and the products of a layer that a device is sure to need longer for than the host
needs to launch it. Both are reckoned, from 13.6 ms for 2,048 tokens of 24 layers of width 1,024 on an H200, of which
the kernels took 7.0."""
SMALLEST_CONTEXT = 1024
"""The fewest tokens of KV cache that a model is started with, if it has so many positions."""

SMALLEST_STATES = 9
"""The fewest state slots that a model with states is started with, slot 0 included: for six sequences that run, and two
snapshots."""

_STATES_PER_SEQUENCE = 4
"""The slots for each sequence that may run: its own, and snapshots of prompts and of ends of turns."""
_FEW_SEQUENCES = 8
"""Where fewer may run, there are as many slots as for these: conversations take turns."""
_UNPAID_BLOCKS = 1 << 16
"""The KV blocks of a model without keys and values, whose blocks take no memory on the device."""

SMALLER: Mapping[str | None, tuple[str, ...]] = {None: ("int8", "int4"), "int8": ("int4",), "fp8": ("int4",)}
"""By quantization, the ones whose weights take less memory."""

GRAPH_BYTES = 1 << 20
"""An estimate of what one captured graph keeps on the device besides the memory that all of them share."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory as its driver reports it, in bytes."""

    total: int
    free: int
    allocated: int = 0
    """The bytes that torch has allocated in this process."""

    @property
    def used(self) -> int:
        """The bytes in use, by other processes and by this one's CUDA context."""
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that may be used, and the share of the memory left by the weights that may become KV cache."""

    available: int
    share: float
    cap: int | None = None
    card: GpuMemory | None = None
    """The GPU as it was when nothing was loaded; None if the budget is of the machine's own memory."""

    def kv_limit(self, left: int) -> int:
        limit = max(0, int(left * self.share))
        return limit if self.cap is None else min(limit, self.cap)


def budget(device: torch.device, options: LoadOptions) -> Budget:
    """The budget of a device: the operator's share of a GPU, all of which may become KV cache, or a quarter of a
    machine's free memory."""
    if device.type == "cuda":
        return card_budget(read_card(device), options.gpu_memory_utilization)
    return Budget(available_bytes(), 0.25, 4 * GIB)


def read_card(device: torch.device) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, allocated=torch.cuda.memory_allocated(device))


def card_budget(card: GpuMemory, utilization: float) -> Budget:
    """Returns a GPU's budget, the unused part of `utilization`; the KV cache gets all that the model leaves."""
    return Budget(available=max(0, int(card.total * utilization) - card.used), share=1.0, card=card)


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The bytes that a draft model takes."""

    weights: int = 0
    block: int = 0
    """The draft model's part of each KV block."""


NO_DRAFT = DraftSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The bytes that a model took on a GPU."""

    resident: int
    """Weights, and the tables of the running sequences."""
    workspace: int
    """Activations and logits of the largest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The bytes that each part of a model gets."""

    weights: int
    draft: int = 0
    """Weights of the draft model."""
    workspace: int
    """Activations and logits of the largest step."""
    graphs: int = 0
    """An estimate of the bytes that captured steps will take: the one size that is not known beforehand."""
    tables: int = 0
    """The tables of the running sequences on a GPU."""
    block: int
    """A KV block, of the model and its draft together."""
    num_blocks: int
    state: int = 0
    """The states of one sequence, in all layers that have one."""
    num_states: int = 0
    """State slots, slot 0 included; 0 if no layer has a state."""
    windows: Windows
    """The block tables of every sequence."""
    chunk: int
    """The most tokens that a step computes of a sequence."""
    available: int
    card: GpuMemory | None = None
    """The card of the budget."""

    @property
    def kv(self) -> int:
        return self.block * self.num_blocks

    @property
    def states(self) -> int:
        return self.state * self.num_states

    @property
    def num_tokens(self) -> int:
        """The tokens that the KV cache holds."""
        return self.windows.room(self.num_blocks - 1, self.chunk)

    @property
    def parts(self) -> list[tuple[str, int, str]]:
        """Name, bytes and a note of each part."""
        return [
            ("weights", self.weights, ""),
            ("draft", self.draft, ""),
            ("KV cache", self.kv, f" ({self.num_tokens} tokens)"),
            *(
                [("states", self.states, f" ({self.num_states - 1} of {size_text(self.state)})")]
                if self.num_states
                else []
            ),
            ("workspace", self.workspace, ""),
            ("tables", self.tables, ""),
            ("graphs", self.graphs, ""),
        ]

    @property
    def needed(self) -> int:
        """The bytes of all parts."""
        return sum(size for _, size, _ in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def text(self) -> str:
        """One line for the operator."""
        parts = ", ".join(f"{name} {size_text(size)}{note}" for name, size, note in self.parts if size)
        card = self.card
        whole = f" (of the GPU's {size_text(card.total)}, {size_text(card.used)} in use)" if card else ""
        return f"{parts}, of {size_text(self.available)} available{whole}"

    def check(self, hint: Callable[[], str] = lambda: "") -> MemoryPlan:
        """Returns this plan.

        Args:
            hint: returns advice if the plan does not fit.

        Raises:
            MemoryHeld: they would fit on the GPU if other processes used none of it.
            NotEnoughMemory: weights, KV cache and states do not fit; the message has the numbers.
        """
        if not self.fits:
            held = 0 if self.card is None else self.card.used - self.card.allocated
            kind = MemoryHeld if self.needed <= self.available + held else NotEnoughMemory
            raise kind(f"not enough memory: {self.text}{hint()}")
        return self


def plan_memory(
    config: ModelConfig,
    kernels: Kernels,
    options: LoadOptions,
    budget: Budget,
    measured: Measured | None = None,
    recipe: Recipe = AS_IT_IS,
    draft: DraftSize = NO_DRAFT,
) -> MemoryPlan:
    """Decides how much memory each part of a model gets; the plan may need more than there is.

    A pool that is smaller than the longest sequence is fine (the scheduler then allows shorter ones only), down to
    `SMALLEST_CONTEXT` tokens. Where layers have a state, the memory for KV is shared with the slots of states.

    Args:
        measured: the bytes that the model took, once it is there; until then the sizes of its tensors serve.
    """
    weights = weight_bytes(config, kernels, recipe)
    workspace = measured.workspace if measured else _workspace_bytes(config, options)
    tables = max(0, measured.resident - weights) if measured else 0
    graphs = (
        _graph_bytes(config, options, workspace) if budget.card is not None and options.cuda_graphs else 0
    )
    layout = KVLayout.of(config, options.block_size)
    windows = Windows(layout.windows, layout.block_size)
    block = layout.block_bytes(kernels.kv_dtype) + draft.block
    state = StateLayout.of(config, options.num_pending).slot_bytes
    left = budget.available - weights - draft.weights - tables - workspace - graphs
    limit = budget.kv_limit(left) if options.kv_bytes is None else options.kv_bytes
    for_states = min(limit // 2, _most_states(options) * state)
    num_blocks = options.num_blocks or _num_blocks(config, windows, options, block, limit - for_states)
    return MemoryPlan(
        weights=weights,
        draft=draft.weights,
        workspace=workspace,
        graphs=graphs,
        tables=tables,
        block=block,
        num_blocks=num_blocks,
        state=state,
        num_states=_num_states(options, state, limit - num_blocks * block),
        windows=windows,
        chunk=options.max_batch_tokens,
        available=budget.available,
        card=budget.card,
    )


def fitting_draft(plan: Callable[..., MemoryPlan], own: DraftSize) -> DraftSize:
    """Returns the size of a model's own layer that drafts; without room for it, 0, and the model is served without it.

    Args:
        plan: plans the model's memory, and takes `draft` as `plan_memory` does.
    """
    return own if plan(draft=own).fits else NO_DRAFT


def what_would_fit(config: ModelConfig, options: LoadOptions, plan: Callable[[Recipe], MemoryPlan]) -> str:
    """Returns advice on a model that does not fit: its memory with each quantization at load that fits, or the nearest.

    Args:
        plan: the plan of a model that is loaded by a recipe.
    """
    found: dict[str, MemoryPlan] = {}
    for quantize in SMALLER.get(options.quantize, ()):
        with suppress(CheckpointError):
            found[quantize] = plan(make_recipe(config, replace(options, quantize=quantize)))
    if not found:
        return ""
    fitting = {name: other for name, other in found.items() if other.fits}
    if fitting:
        ways = (f"--quantize {name} would need {size_text(other.needed)}" for name, other in fitting.items())
        return "; " + ", ".join(ways)
    name, least = min(found.items(), key=lambda each: each[1].needed)
    return f"; even --quantize {name} would need {size_text(least.needed)}"


def weight_bytes(config: ModelConfig, kernels: Kernels, recipe: Recipe = AS_IT_IS) -> int:
    """The bytes of all weights of a model, as the kernels keep them."""
    head, (maps, experts) = head_spec(config, recipe), _sorted_out(config, kernels, recipe)
    num_loose = _num_loose(config)
    is_packed, spec = kernels.keeps_narrow and packs_embedding(config, recipe), config.spec
    if spec.has_embedding and is_packed:
        maps.append(embedding_spec(config, recipe))
    elif spec.has_embedding:
        num_loose += config.vocab_rows * config.hidden_size
    is_shared = spec.ties_embeddings and spec.has_embedding and (is_packed or head.format == DENSE)
    if spec.has_head and not is_shared:
        maps.append(head)
    if (own := spec.layer_embeddings) is not None:
        maps.append(layer_embeddings_spec(own, config, recipe))
        table = layer_table_spec(own, recipe)
        if kernels.keeps_narrow and isinstance(table.format, Integers):
            maps.append(table)
        elif (
            not kernels.keeps_narrow
        ):  # else its file is mapped, and the system keeps as much of it as there is room for
            num_loose += own.vocab_size * own.width
    return tensor_bytes(maps, num_loose, kernels) + sum(size for _, size in experts)


def expert_bytes(config: ModelConfig, kernels: Kernels, recipe: Recipe = AS_IT_IS) -> tuple[int, int]:
    """Returns the bytes of all experts of a model, and the bytes of weights that a step of one token reads: its
    experts, and all other weights but the embedding."""
    others, experts = _sorted_out(config, kernels, recipe)
    chosen = sum(size * router.top_k / router.num_experts for router, size in experts)
    num_loose = _num_loose(config)
    rest = tensor_bytes([*others, head_spec(config, recipe)], num_loose, kernels)
    return sum(size for _, size in experts), rest + int(chosen)


def _num_loose(config: ModelConfig) -> int:
    """The numbers of norms and vectors."""
    vectors = (vector for layer in config.layers for vector in layer.vectors().values())
    return sum(norm.size for _, norm in config.spec.norms()) + sum(own.size * own.each for own in vectors)


def _sorted_out(
    config: ModelConfig, kernels: Kernels, recipe: Recipe
) -> tuple[list[LinearSpec], list[tuple[Router, int]]]:
    """The linear maps of all layers that are of no expert; and the bytes of each one of experts, over all experts of a
    layer, which are alike (`check_recipe`)."""
    one, others = with_one_expert(config), []
    experts: list[tuple[Router, int]] = []
    for number, layer in enumerate(config.layers):
        own = layer.feed_forward
        for field, spec in linear_specs(one, number, recipe).items():
            if isinstance(own, Experts) and field.startswith("experts."):
                experts.append((own.router, len(own.own) * tensor_bytes([spec], 0, kernels)))
            else:
                others.append(spec)
    return others, experts


def tensor_bytes(maps: Iterable[LinearSpec], num_loose: int, kernels: Kernels) -> int:
    """The bytes of linear maps as the kernels keep them, and of `num_loose` numbers in floating point."""
    dtype, total = kernels.embedding_dtype, num_loose * kernels.embedding_dtype.itemsize
    for spec in maps:
        format = spec.format if isinstance(spec.format, kernels.packs) else DENSE
        if isinstance(format, Integers) and not kernels.keeps_narrow:
            format = format.widened
        num_biases = spec.out_features if spec.bias else 0
        total += format.num_bytes(spec.out_features, spec.in_features, dtype) + num_biases * dtype.itemsize
    return total


def _num_blocks(config: ModelConfig, windows: Windows, options: LoadOptions, block: int, limit: int) -> int:
    """The KV blocks that the limit holds: the smallest useful number at least, and no more than could be used."""
    max_model_len = options.max_model_len or config.max_position
    per_sequence = windows.num_tables * -(-max_model_len // options.block_size)
    smallest = 1 + windows.num_tables * -(-min(max_model_len, SMALLEST_CONTEXT) // options.block_size)
    most = 1 + per_sequence * options.max_num_seqs
    return max(smallest, min(limit // block if block else max(per_sequence + 1, _UNPAID_BLOCKS), most))


def _num_states(options: LoadOptions, state: int, limit: int) -> int:
    """The state slots that the limit holds: the fewest at least, and no more than could be used."""
    return max(SMALLEST_STATES, min(limit // state, _most_states(options))) if state else 0


def _most_states(options: LoadOptions) -> int:
    return 1 + _STATES_PER_SEQUENCE * max(options.max_num_seqs, _FEW_SEQUENCES)


def _workspace_bytes(config: ModelConfig, options: LoadOptions) -> int:
    """Returns the bytes, in float32, of the inputs and outputs of the widest layer's linear maps in the largest step,
    of the rows that its state follows from, and of the logits."""
    per_token = max(
        _map_sizes(layer.mixer)
        + (0 if layer.state is None else layer.state.row_floats)
        + (0 if layer.feed_forward is None else layer.feed_forward.numbers_per_token)
        + _map_sizes(layer.embedding)
        for layer in config.layers
    )
    if (own := config.spec.layer_embeddings) is not None:
        per_token += 2 * own.width
    num_logits = 3 * options.max_rows * config.vocab_size if config.spec.has_head else 0
    return 4 * (options.max_batch_tokens * per_token + num_logits)


def _map_sizes(part: Mixer | LayerEmbedding | None) -> int:
    """The inputs and outputs of the linear maps of a part of a layer."""
    maps = {} if part is None else part.maps()
    return sum(map.in_features + sum(rows.count for rows in map.rows) for map in maps.values())


def graph_tokens(config: ModelConfig, options: LoadOptions) -> int:
    """Returns the tokens of the largest step for which a graph may be worth its memory.

    The device runs more tokens than that for longer than the host launches them, the sooner the wider a layer is: it
    multiplies each token by some 12 squares of the hidden size.
    """
    balance = _LAUNCHED_PRODUCTS // (12 * config.hidden_size**2)
    return min(options.max_batch_tokens, max(CAPTURED_TOKENS, min(balance, _MOST_CAPTURED_TOKENS)))


def _graph_bytes(config: ModelConfig, options: LoadOptions, workspace: int) -> int:
    """Graphs share the memory of the largest captured step, a part of the largest step's; each keeps its launches."""
    largest = graph_tokens(config, options) / options.max_batch_tokens
    num_graphs = options.max_num_seqs // 8 + 80 + 4 * options.max_drafts
    return int(workspace * largest) + num_graphs * GRAPH_BYTES
