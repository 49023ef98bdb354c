"""The part of a machine, of a model and of a table of kernels that one of several processes has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.cores import num_cores
from penstock.engine.execution.memory import Budget
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.ranks import Ranks, World
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.split import share_experts, split_config
from penstock.engine.model.split_files import SplitFiles
from penstock.engine.model.stage_files import StageFiles
from penstock.engine.model.stages import cut_config
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose, Filters, Part, SamplingTables


def agreed(number: int, processes: Ranks | World | None) -> int:
    """The least that any of these processes has."""
    return number if processes is None else processes.least(number)


def own_device(device: torch.device, world: World) -> torch.device:
    """A GPU for each process; on a CPU all compute on the same one."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(world.rank)
    return torch.device("cuda", world.rank)


def own_options(options: LoadOptions, device: torch.device, world: World) -> LoadOptions:
    """Returns the options of one process: its share of a CPU's threads. The part that it quantizes is not kept."""
    options = replace(options, keep_quantized=False)
    if device.type != "cpu":
        return options
    num_threads = max(1, (options.num_threads or num_cores()) // world.size)
    torch.set_num_threads(num_threads)
    return replace(options, num_threads=num_threads)


def own_budget(limits: Budget, world: World | None) -> Budget:
    """The budget of one process: a GPU of its own, or its share of the machine's memory."""
    if world is None or limits.card is not None:
        return limits
    cap = None if limits.cap is None else limits.cap // world.size
    return replace(limits, available=limits.available // world.size, cap=cap)


def own_part(
    config: ModelConfig, files: TensorFiles, options: LoadOptions, world: World
) -> tuple[ModelConfig, TensorFiles]:
    """The part of a model that one process has, of each layer and of the layers, and its tensors.

    Raises:
        CheckpointError: the model cannot be divided so.
    """
    if world.ranks is not None and options.data_parallel_attention:
        return share_experts(config, world.ranks.size, world.ranks.rank), files
    if world.ranks is not None:
        part = split_config(config, world.ranks.size, world.ranks.rank, options.expert_parallel)
        config, files = part, SplitFiles(files, config, part, world.ranks)
    if world.num_stages > 1:
        config = cut_config(config, world.num_stages, world.stage)
        files = StageFiles(files, config)
    return config, files


def own_kernels(kernels: Kernels, world: World, *, shares_experts: bool = False) -> Kernels:
    """The kernels of one process; with `shares_experts`, of one that has all but some experts.

    Sums and hidden states go from process to process between a layer's linear maps and between layers, so that no
    native kernel has a whole pass, nor an activation in a map.
    """

    def linear(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
        return kernels.linear(tensors, format, bias)

    single = replace(kernels, linear=linear, keeps_narrow=False, team=None)
    if world.ranks is not None and shares_experts:
        # A step has other numbers of rows on other ranks: no graph can hold it.
        return replace(single, is_static=False, expert_ranks=world.ranks)
    return single if world.ranks is None else _ranked(single, world.ranks)


def _ranked(kernels: Kernels, ranks: Ranks) -> Kernels:
    return replace(
        kernels,
        choose=_choose_together(kernels.choose, ranks),
        is_static=bool(ranks.least(int(kernels.is_static))),
        ranks=ranks,
    )


def _choose_together(choose: Choose, ranks: Ranks) -> Choose:
    """Chooses tokens from the logits that each rank has, or from whole rows where filters need them.

    From whole rows every rank chooses, and rank 0's tokens count.
    """
    if not ranks.least(int(choose is not reference.choose)):
        choose = reference.choose  # candidates of different kernels would not fit each other

    def together(
        logits: Tensor,
        tables: SamplingTables,
        seats: Tensor,
        numbers: Tensor,
        filters: Filters,
        masks: Tensor | None = None,
        part: Part | None = None,
    ) -> Tensor:
        if not filters.need_whole_rows:
            part = Part(ranks.rank * logits.shape[1], ranks.gather)
        token_ids = choose(logits, tables, seats, numbers, filters, masks, part)
        if filters.need_whole_rows:
            ranks.copy_first(token_ids)
        return token_ids

    return together
