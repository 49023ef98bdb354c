"""Files that a command is asked to write; they are looked at before any work is spent on what goes into them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from penstock.app.errors import OperatorError


def check_output(flag: str, path: Path | None) -> None:
    """None is a flag that was not given.

    Raises:
        OperatorError: the folder of `path` is not there, or `path` is a folder itself.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise OperatorError(f"{flag} {path}: there is no such folder")
    if path.is_dir():
        raise OperatorError(f"{flag} {path}: this is a folder")


def write_figures(path: Path | None, figures: object) -> None:
    """Writes them as JSON, dataclasses by their fields, if a file is wanted."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, default=asdict) + "\n", encoding="utf-8")
