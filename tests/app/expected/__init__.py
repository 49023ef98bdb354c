"""Whole outputs as they were last read by a person; `EXPECTED=write pytest FILE` writes them anew, to be read again."""

from __future__ import annotations

import os
from pathlib import Path


def expected(name: str, text: str) -> str:
    """The text of a file here, after `text` is written to it where the environment asks for that."""
    path = Path(__file__).parent / name
    if os.environ.get("EXPECTED") == "write":
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")
