"""Estimates a model's memory on a device, before it is loaded and for a server's first lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution.companions import own_size
from penstock.engine.execution.memory import (
    Budget,
    MemoryPlan,
    budget,
    expert_bytes,
    fitting_draft,
    plan_memory,
)
from penstock.engine.kernels.cpu.native import NATIVE_FORMATS, NativeUnavailable
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.select import check_native
from penstock.engine.model.dtype import (
    check_kv_heads,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    kv_dtype_name,
)
from penstock.engine.model.prediction import PredictionSource
from penstock.engine.model.tensors import check_recipe, make_recipe
from penstock.engine.planning.state_group import most_running
from penstock.engine.sizes import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A model's memory on its device, and the types that follow from its options."""

    dtype: str
    kv_dtype: str
    plan: MemoryPlan
    """The plan may need more than there is."""
    max_model_len: int
    """The tokens of the longest sequence that would be served."""
    max_num_seqs: int
    experts: int = 0
    """The bytes of all experts."""
    read_by_a_token: int = 0
    """The bytes of weights that a step of one token reads."""

    @property
    def weights(self) -> int:
        return self.plan.weights

    @property
    def kv_of_a_token(self) -> float:
        """The bytes that the cache grows by with every token of a sequence that is longer than all windows."""
        windows = self.plan.windows
        return self.plan.block * (windows.num_unbounded or windows.num_tables) / windows.block_size

    @property
    def most_running(self) -> int:
        """The sequences that run at the same time at most, however short they are."""
        return (
            min(self.max_num_seqs, most_running(self.plan.num_states))
            if self.plan.num_states
            else self.max_num_seqs
        )

    def num_streams(self, context: int) -> int:
        """The sequences of so many tokens that can run at the same time; 0 if the plan does not fit."""
        if not self.plan.fits:
            return 0
        return min(self.most_running, (self.plan.num_blocks - 1) // self.plan.windows.num_held(context, 1))


def estimate(
    config: ModelConfig,
    options: LoadOptions,
    limits: Budget | None = None,
    *,
    has_native: bool = True,
    prediction: PredictionSource | None = None,
) -> Estimate:
    """The sizes of a model that nothing was loaded of.

    Args:
        limits: the budget of the device; None asks the device for it.
        has_native: whether there are native kernels; without them, a CPU computes in float32.
        prediction: the model's own layer that drafts, which counts where there is room; ranks have none.

    Raises:
        CheckpointError: the model cannot be served in the types that are asked for.
    """
    device = choose_device(options.device)
    options = options.for_device(device.type)
    check_kv_heads(options.kv_dtype, config)
    dtype = choose_dtype(options.dtype, config, device)
    is_native = has_native and _is_native(config, options)
    kernels = reference_kernels(device, dtype, dtype if is_native else torch.float32)
    packs_on_cpu = is_native and device.type == "cpu"
    kernels = replace(
        kernels,
        kv_dtype=choose_kv_dtype(options.kv_dtype, kernels.kv_dtype, device),
        packs=NATIVE_FORMATS if packs_on_cpu else kernels.packs,
        keeps_narrow=packs_on_cpu,
    )
    recipe = make_recipe(config, options)
    check_recipe(config, recipe)
    plan_of = partial(plan_memory, config, kernels, options, limits or budget(device, options), recipe=recipe)
    plan = plan_of()
    drafts = options.max_drafts > 0 and options.own_drafts and config.num_ranks == 1
    if prediction is not None and drafts:
        own = replace(prediction.recipe, quantization=recipe.quantization)
        _, size = own_size(replace(prediction, recipe=own), config, kernels, options)
        plan = plan_of(draft=fitting_draft(plan_of, size))
    wanted = options.max_model_len or config.max_position
    experts, read_by_a_token = expert_bytes(config, kernels, recipe) if config.spec.chosen_share else (0, 0)
    return Estimate(
        dtype=str(kernels.embedding_dtype).removeprefix("torch."),
        kv_dtype=kv_dtype_name(kernels.kv_dtype),
        plan=plan,
        max_model_len=wanted if config.context_window or options.kv_keep else min(wanted, plan.num_tokens),
        max_num_seqs=options.max_num_seqs,
        experts=experts,
        read_by_a_token=read_by_a_token,
    )


def _is_native(config: ModelConfig, options: LoadOptions) -> bool:
    try:
        check_native(config, options)
    except NativeUnavailable:
        return False
    return True


def card_rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """All of a GPU's memory, and what becomes of it: name, bytes, note. The last row is the sum of the others.

    What is in use before includes the workspace of the kernels, which is there as soon as these are.
    """
    card = plan.card
    assert card is not None
    rest = card.free - plan.needed
    return [("in use before", card.used, ""), *plan.parts, ("free", rest, ""), ("in all", card.total, "")]


def card_table(plan: MemoryPlan) -> list[str]:
    """The rows of a GPU's memory as lines for the operator."""
    return [
        f"GPU memory  {name:<13} {size_text(size):>10} {note}".rstrip()
        for name, size, note in card_rows(plan)
    ]
