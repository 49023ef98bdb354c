"""`loadtests/gpu/tune`: measures tilings of the products with packed weights, and writes the best into tiles.json.

A tiling is written where it beats the rule of `engine/kernels/triton/tiles.py` on the linear maps of an 8 B Llama. A
server reads the file when it starts, and never tunes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from engine.fields import Fields
from engine.kernels.packed import Code, PackedWeight, UnpackedLinear
from engine.kernels.triton.attention_tiling import Chip, TensorCores
from engine.kernels.triton.tiles import (
    FILE,
    ROW_CLASSES,
    Card,
    ProductTiling,
    by_rule,
    shared_bytes,
    tiling_key,
)
from engine.model.parse import parse_config
from loadtests.gpu.command import NoDevice
from loadtests.gpu.figures import say
from loadtests.gpu.quantized import Layout, map_sizes, random_weight
from loadtests.gpu.sizes import LLAMA_8B
from loadtests.gpu.timing import seconds as timed

MIN_GAIN = 1.03
"""A tiling is written if it is so many times as fast as the rule's: less may be noise."""
HOPELESS = 1.25
"""A tiling that takes so many times the best one's time for one map is not measured on the others."""
WALKED_BYTES = 256 << 20
"""Weights are read in turn with so many bytes of others: more than any cache holds."""
MOST_IN_USE = 0.05
"""The share of the card's memory that others may use: beside a server, times would be wrong, and its tokens late."""

Entries = dict[str, dict[str, dict[str, int]]]
"""{class of code: {most rows of a class: fields of ProductTiling}}, as in tiles.json for one card."""


@dataclass(frozen=True, slots=True)
class Task:
    """The products that one entry of the file is for."""

    code: Code
    dtype: torch.dtype
    """The type of x: int8 is multiplied as it is."""
    most_rows: int
    group_size: int | None
    zero: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that are measured: the fewest rows are nearly all that a server of one user has."""
        return (1, 16) if self.most_rows == 16 else (self.most_rows,)


Copies = Sequence[PackedWeight]
"""Weights of one size, which are multiplied in turn, so that none is left in a cache."""
Seconds = Callable[[Task, ProductTiling, Copies, Tensor], float]
"""The time of one product by one tiling."""


def tune(options: argparse.Namespace, deadline_s: float) -> int:
    """Tunes every class of code that is asked for, until the time is over."""
    path = options.out or FILE
    if options.dry_run:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        card = Card(Chip(132, TensorCores.WGMMA, 227 << 10), "a card that is not there")
        seconds: Seconds = _by_torch
    else:
        device = torch.device("cuda", 0)
        _check_alone(*torch.cuda.mem_get_info(device))
        card, seconds = Card.of(device), _on_card(device)
    found: Entries = {}
    tasks = [task for task in _tasks() if options.only in tiling_key(task.code, task.dtype)]
    for number, task in enumerate(tasks):
        left_s = (deadline_s - time.monotonic()) / (len(tasks) - number)
        key = tiling_key(task.code, task.dtype)
        name = f"[{number + 1}/{len(tasks)}] {key}, up to {task.most_rows} rows"
        say(f"{name}: at most {max(0.0, left_s):.0f} s")
        weights = _weights(task, device, is_dry=options.dry_run)
        rule = by_rule(task.code, task.dtype, task.most_rows, card.chip)
        tried = itertools.islice(candidates(task, card), 3 if options.dry_run else None)
        with torch.inference_mode():
            best, gain, count = search(task, rule, tried, weights, seconds, until_s=time.monotonic() + left_s)
        verdict = "it stays" if best == rule else f"{gain:.2f} times as fast as the rule's: {best}"
        say(f"{name}: {count} tilings, {verdict}")
        if best != rule:
            found.setdefault(key, {})[str(task.most_rows)] = asdict(best)
            if not options.dry_run:
                write(path, card.name, found)
    if options.dry_run:
        print(json.dumps({card.name: found}, indent=1))
    else:
        say(f"{sum(map(len, found.values()))} entries for {card.name} in {path}")
    return 0


def _check_alone(free: int, total: int) -> None:
    """
    Raises:
        NoDevice: somebody else uses the card.
    """
    if total - free > MOST_IN_USE * total:
        raise NoDevice(
            f"others use {(total - free) / (1 << 30):.1f} GiB of this card; tiles are not measured beside a server: "
            "stop it first"
        )


def _tasks() -> list[Task]:
    """The fewest rows first, which matter most, of every class of code."""
    kinds: list[tuple[Code, torch.dtype, int | None, bool]] = [
        (Code.INT4, torch.bfloat16, 128, False),
        (Code.FLOAT8, torch.bfloat16, None, False),
        (Code.INT8, torch.int8, None, False),
        (Code.UINT4, torch.bfloat16, 128, True),
        (Code.INT8, torch.bfloat16, 128, False),
    ]
    return [
        Task(code, dtype, rows, group_size, zero)
        for rows in ROW_CLASSES
        for code, dtype, group_size, zero in kinds
    ]


def candidates(task: Task, card: Card) -> Iterator[ProductTiling]:
    """Tilings that may fit the card, in random order: what time allows is spread over all of them."""
    few = task.most_rows == ROW_CLASSES[0]
    sizes = itertools.product(
        (16,) if few else (32, 64, 128),
        (32, 64, 128),
        (64, 128, 256),
        (4, 8),
        (2, 3, 4, 5, 6),
        (1, 2, 3, 4, 6) if few else (1, 2),
    )
    names = "block_m", "block_n", "block_k", "num_warps", "num_stages", "programs_per_sm"
    every = [ProductTiling(**dict(zip(names, each, strict=True))) for each in sizes]
    Random(0).shuffle(every)
    cores, room = card.chip.tensor_cores, card.chip.shared_bytes
    return (each for each in every if shared_bytes(each, task.code, task.dtype, cores) <= room)


def search(
    task: Task,
    rule: ProductTiling,
    tried: Iterator[ProductTiling],
    weights: Sequence[tuple[Copies, Sequence[Tensor]]],
    seconds: Seconds,
    until_s: float,
) -> tuple[ProductTiling, float, int]:
    """The fastest tiling, which is the rule's if none is faster by MIN_GAIN.

    Args:
        weights: of each map, and its inputs [rows, in] of every number of rows.
        until_s: of the monotonic clock; what is begun by then is finished.

    Returns:
        The tiling, its speed over that of the rule's, and how many were measured.
    """

    def times(tiling: ProductTiling) -> Iterator[float]:
        return (seconds(task, tiling, copies, x) for copies, inputs in weights for x in inputs)

    of_rule = best_times = list(times(rule))
    best, count = rule, 1
    for tiling in tried:
        if time.monotonic() >= until_s:
            break
        count += 1
        found = []
        for time_s, least_s in zip(times(tiling), best_times, strict=True):
            found.append(time_s)
            if time_s > HOPELESS * least_s:
                break
        else:
            if sum(found) < sum(best_times):
                best, best_times = tiling, found
    gain = sum(of_rule) / sum(best_times)
    return (best, gain, count) if gain >= MIN_GAIN else (rule, 1.0, count)


def _weights(task: Task, device: torch.device, *, is_dry: bool) -> list[tuple[Copies, list[Tensor]]]:
    """The maps of a layer, the largest first, and what they are multiplied with."""
    config = parse_config(Fields("config.json", LLAMA_8B.config))
    layout = Layout("", task.code, task.group_size, zero=task.zero)
    maps: list[tuple[Copies, list[Tensor]]] = []
    for out_features, in_features in sorted(map_sizes(config), reverse=True):
        sizes = (out_features // 64, in_features // 32) if is_dry else (out_features, in_features)
        inputs = [torch.randn(rows, sizes[1], device=device) for rows in task.rows]
        if task.dtype == torch.int8:
            inputs = [(each * 30).clamp(-127, 127) for each in inputs]
        copies = [random_weight(layout, task.code, *sizes, device)]
        num_copies = 1 if is_dry else max(1, WALKED_BYTES // copies[0].num_bytes)
        copies += [random_weight(layout, task.code, *sizes, device) for _ in range(num_copies - 1)]
        maps.append((copies, [each.to(task.dtype) for each in inputs]))
    return maps


def _by_torch(task: Task, tiling: ProductTiling, copies: Copies, x: Tensor) -> float:  # noqa: ARG001
    linear = UnpackedLinear(copies[0], None)
    return timed(torch.device("cpu"), lambda: linear(x.float()))


def _on_card(device: torch.device) -> Seconds:
    """By the kernel; infinite for a tiling that does not compile, fit or run."""
    from engine.kernels.triton.packed_linear import multiply

    @dataclass(frozen=True)
    class Fixed(Card):
        """A card with one tiling for everything."""

        only: ProductTiling | None = None

        def tiling(self, code: Code, dtype: torch.dtype, most_rows: int) -> ProductTiling:  # noqa: ARG002
            assert self.only is not None
            return self.only

    chip = Card.of(device).chip

    def measure(task: Task, tiling: ProductTiling, copies: Copies, x: Tensor) -> float:
        card = Fixed(chip, only=tiling)
        scale = torch.ones(len(x), device=device) if task.dtype == torch.int8 else None

        def products() -> None:
            for weight in copies:
                multiply(x, weight, scale, None, torch.bfloat16, card)

        try:
            return timed(device, products) / len(copies)
        except torch.AcceleratorError:
            raise
        except Exception:  # Triton has errors of its own, and asserts
            return float("inf")

    return measure


def write(path: Path, card: str, entries: Entries) -> None:
    """Puts entries of a card into the file, and leaves all others; a reader sees the old file or the new one."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = table.setdefault(card, {})
    for key, of_rows in entries.items():
        known.setdefault(key, {}).update(of_rows)
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(table, indent=1) + "\n")
    Path(new).chmod(0o644)
    Path(new).replace(path)
