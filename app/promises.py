"""The promises of a machine in its own terms: said when a model is ready, and remembered for `penstock doctor`."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.app.settings import EngineSettings
from penstock.engine.kernels.cpu.build import cache_directory
from penstock.priority.admission import Admission
from penstock.priority.lanes import Lane

_EXAMPLE_TOKENS = 4_000
_MOST_REMEMBERED = 32


def promises(admission: Admission, context_length: int) -> Iterator[str]:
    """Yields what each lane promises to prompts of which nothing is cached; nothing while too little was measured."""
    for lane in Lane:
        promised_s = admission.promised_s(lane, 1)
        if promised_s is None:
            continue
        longest = bisect_right(
            range(1, context_length), promised_s, key=lambda num: admission.promised_s(lane, num) or 0.0
        )
        said = f"{lane.label}: first token within {promised_s:g} s for prompts of up to {longest:,} tokens"
        if longest < (example := min(_EXAMPLE_TOKENS, context_length - 1)):
            said += f", within {admission.promised_s(lane, example):.1f} s for {example:,}"
        yield said


def remember(folder: Path, settings: EngineSettings, said: list[str]) -> None:
    """Keeps what was promised for a model, with the day; a cache that cannot be written keeps nothing."""
    kept = _kept()
    kept.pop(_key(folder, settings), None)
    kept[_key(folder, settings)] = [f"{one} (measured on {time.strftime('%Y-%m-%d')})" for one in said]
    place = _place()
    new = place.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(dict([*kept.items()][-_MOST_REMEMBERED:]), indent=1), encoding="utf-8")
        new.replace(place)


def remembered(folder: Path, settings: EngineSettings) -> list[str]:
    """Returns what was promised when the model was last served in these types."""
    return _kept().get(_key(folder, settings), [])


def _kept() -> dict[str, list[str]]:
    try:
        kept = json.loads(_place().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _place() -> Path:
    return cache_directory() / "promises.json"


def _key(folder: Path, settings: EngineSettings) -> str:
    return " ".join([str(folder.resolve()), settings.device, settings.dtype, settings.quantize or ""])
