"""The part of a machine and of a table of kernels that one of several ranks has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.cores import num_cores
from penstock.engine.execution.memory import Budget
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose, Filters, Part, SamplingTables


def agreed(number: int, ranks: Ranks | None) -> int:
    """The least that any rank has."""
    return number if ranks is None else ranks.least(number)


def own_device(device: torch.device, ranks: Ranks) -> torch.device:
    """A GPU for each rank; on a CPU all compute on the same one."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def own_options(options: LoadOptions, device: torch.device, ranks: Ranks) -> LoadOptions:
    """Returns the options of one rank: its share of a CPU's threads. The part that it quantizes is not kept."""
    options = replace(options, keep_quantized=False)
    if device.type != "cpu":
        return options
    num_threads = max(1, (options.num_threads or num_cores()) // ranks.size)
    torch.set_num_threads(num_threads)
    return replace(options, num_threads=num_threads)


def own_budget(limits: Budget, ranks: Ranks | None) -> Budget:
    """The budget of one rank: a GPU of its own, or its share of the machine's memory."""
    if ranks is None or limits.card is not None:
        return limits
    cap = None if limits.cap is None else limits.cap // ranks.size
    return replace(limits, available=limits.available // ranks.size, cap=cap)


def ranked(kernels: Kernels, ranks: Ranks) -> Kernels:
    """The kernels of one rank.

    The sums lie between a layer's linear maps, so that no native kernel has a whole pass, nor an activation in a map.
    """

    def linear(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
        return kernels.linear(tensors, format, bias)

    return replace(
        kernels,
        linear=linear,
        choose=_choose_together(kernels.choose, ranks),
        is_static=bool(ranks.least(int(kernels.is_static))),
        keeps_narrow=False,
        ranks=ranks,
        team=None,
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
