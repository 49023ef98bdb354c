"""`loadtests/gpu/tune`: measures tilings of linear maps and of experts, and writes the best into tiles.json.

A tiling is written where it beats the rule of `engine/kernels/triton/tiles.py` on what its task measures. A server
reads the file when it starts, and never tunes.
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
from typing import Any

import torch
from torch import Tensor

from loadtests.gpu.command import NoDevice
from loadtests.gpu.figures import say
from loadtests.gpu.tiling_tasks import Task, tasks
from loadtests.gpu.timing import seconds as timed
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.kernels.triton.tiles import FILE, ROW_CLASSES, Card, ProductTiling, shared_bytes

MIN_GAIN = 1.03
"""A tiling is written if it is so many times as fast as the rule's: less may be noise."""
HOPELESS = 1.25
"""A tiling that takes so many times the best one's time for one map is not measured on the others."""
MOST_IN_USE = 0.05
"""The share of the card's memory that others may use: beside a server, times would be wrong, and its tokens late."""

Entries = dict[str, dict[str, dict[str, int]]]
"""{class of code: {most rows of a class: fields of ProductTiling}}, as in tiles.json for one card."""
Seconds = Callable[[Task, ProductTiling, Any, Tensor], float]
"""The time of one product of weights and x by one tiling."""


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
    wanted = [task for task in tasks() if options.only in task.key]
    for number, task in enumerate(wanted):
        left_s = (deadline_s - time.monotonic()) / (len(wanted) - number)
        name = f"[{number + 1}/{len(wanted)}] {task.key}, up to {task.most_rows} rows"
        say(f"{name}: at most {max(0.0, left_s):.0f} s")
        weights, rule = task.weights(device, is_dry=options.dry_run), task.rule(card.chip)
        tried = itertools.islice(candidates(task, card), 3 if options.dry_run else None)
        with torch.inference_mode():
            best, gain, count = search(task, rule, tried, weights, seconds, until_s=time.monotonic() + left_s)
        verdict = "it stays" if best == rule else f"{gain:.2f} times as fast as the rule's: {best}"
        say(f"{name}: {count} tilings, {verdict}")
        if best != rule:
            found.setdefault(task.key, {})[str(task.most_rows)] = asdict(best)
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


def candidates(task: Task, card: Card) -> Iterator[ProductTiling]:
    """Tilings that may fit the card, in random order: what time allows is spread over all of them."""
    choices: dict[str, tuple[int, ...]] = {
        "block_m": (16,) if task.most_rows == ROW_CLASSES[0] else (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6),
    } | task.choices(card.chip)
    every = [
        ProductTiling(**dict(zip(choices, each, strict=True)))
        for each in itertools.product(*choices.values())
    ]
    Random(0).shuffle(every)
    cores, room = card.chip.tensor_cores, card.chip.shared_bytes
    return (each for each in every if shared_bytes(each, task.code, task.dtype, cores) <= room)


def search(
    task: Task,
    rule: ProductTiling,
    tried: Iterator[ProductTiling],
    weights: Sequence[tuple[Any, Sequence[Tensor]]],
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
        return (seconds(task, tiling, own, x) for own, inputs in weights for x in inputs)

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


def _by_torch(task: Task, tiling: ProductTiling, weights: Any, x: Tensor) -> float:  # noqa: ARG001
    return timed(torch.device("cpu"), task.work(weights, x, None)[0])


@dataclass(frozen=True)
class _Fixed(Card):
    """A card with one tiling for everything."""

    only: ProductTiling | None = None

    def known(self, key: str, most_rows: int) -> ProductTiling | None:  # noqa: ARG002
        return self.only


def _on_card(device: torch.device) -> Seconds:
    """By the kernel; infinite for a tiling that does not compile, fit or run."""
    chip = Card.of(device).chip

    def measure(task: Task, tiling: ProductTiling, weights: Any, x: Tensor) -> float:
        run, count = task.work(weights, x, _Fixed(chip, only=tiling))
        try:
            return timed(device, run) / count
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
