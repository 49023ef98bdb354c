"""`penstock check`: what is loaded, asked and compared, and how it is told."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app import doctor
from penstock.app.check import ours, theirs
from penstock.app.check.compare import Distance, compare, total
from penstock.app.checkpoint import find_checkpoint, model_name
from penstock.app.errors import OperatorError
from penstock.app.log import configure_log, progress_bar
from penstock.app.outputs import check_output, write_figures
from penstock.app.settings import EngineSettings
from penstock.app.tables import table
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config

if TYPE_CHECKING:
    from penstock.engine.config import ModelConfig

VERDICTS = (
    (0.01, "it says what its weights say"),
    (0.1, "it says nearly what its weights say, as weights do that are rounded to 4 bits"),
    (float("inf"), "it is far from what its weights say; another --quantize or --dtype may be nearer"),
)
"""The verdicts by the bound that the mean KL is below."""
WRONG_BELOW = 0.5
"""The share of likeliest tokens that agree below which something is broken: no rounding does that."""


def run(flags: Mapping[str, str], output: Path | None = None) -> int:
    """Prints what was found; 1 if the model is wrong.

    Args:
        flags: settings by name, as the command line has them.
        output: a file for the figures.

    Raises:
        OperatorError: there is no such model, or it cannot be served.
    """
    check_output("--json", output)
    configure_log("info")
    settings = EngineSettings.load(flags)
    folder = find_checkpoint(settings.model, settings.revision)
    try:
        config = read_config(folder)
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    for check in (doctor.check_kernels(), *doctor.check_types(settings)):
        print(check, flush=True)
    predictions, speed = ours.read(flags)
    gc.collect()  # what is kept of ours would be missing for theirs
    by_kind, reason = dict[str, Distance](), ""
    try:
        by_kind = _compare(folder, config, predictions)
    except theirs.LeftOut as error:
        reason = str(error)
    rows = [*_speed_rows(speed), *_distance_rows(by_kind)]
    print("\n" + table(["", model_name(settings.model, None)], rows) + "\n")
    write_figures(output, {"speed": asdict(speed), "texts": by_kind, "left_out": reason})
    if reason:
        print(f"not compared: {reason}")
        return 0
    return _judge(total(by_kind.values()))


def _compare(
    folder: Path, config: ModelConfig, predictions: Sequence[ours.Predictions]
) -> dict[str, Distance]:
    """The distances by kind of text."""
    theirs.check_room(folder, config)
    network = theirs.load(folder)
    found = defaultdict[str, list[Distance]](list)
    with progress_bar("comparing") as update:
        for number, each in enumerate(predictions, 1):
            exact = theirs.log_probabilities(network, [*each.token_ids, *each.greedy[:-1]])
            found[each.kind].append(compare(each, exact))
            update(number / len(predictions))
    return {kind: total(distances) for kind, distances in found.items()}


def _speed_rows(speed: ours.Speed) -> Iterator[list[str]]:
    yield ["loading", f"{speed.loading_s:,.1f} s"]
    yield [f"a prompt of {speed.prompt_length} tokens", f"{speed.prompt:,.0f} tokens/s"]
    yield ["one stream", f"{speed.stream:,.1f} tokens/s"]


def _distance_rows(by_kind: Mapping[str, Distance]) -> Iterator[list[str]]:
    if not by_kind:
        yield ["KL to float32", "not compared"]
        return
    every = total(by_kind.values())
    yield ["KL to float32", f"{every.mean_kl:.6f}"]
    yield from ([f"  {kind}", f"{found.mean_kl:.6f}"] for kind, found in by_kind.items())
    yield ["likeliest token agrees", f"{every.agreeing:,} of {every.places:,}"]
    yield ["greedy tokens agree", f"{every.greedy:,} of {every.chosen:,}"]


def _judge(every: Distance) -> int:
    if not every.agreement >= WRONG_BELOW:
        print(f"wrong: of the likeliest tokens only {every.agreement:.0%} are those of its weights")
        return 1
    print(next(text for bound, text in VERDICTS if not every.mean_kl >= bound))
    return 0
