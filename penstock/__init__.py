"""Penstock's one name in site-packages: the command starts here, and so does `from penstock import LLM`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import isolation

if TYPE_CHECKING:
    from app.offline.llm import LLM

__all__ = ["LLM"]

_HERE = Path(__file__).resolve().parent

# A wheel holds app/, gateway/, priority/, engine/ and static/ in penstock/lib; in a checkout they lie beside penstock/.
PACKAGES = _HERE / "lib" if (_HERE / "lib").is_dir() else _HERE.parent

isolation.install(PACKAGES)


def __getattr__(name: str) -> object:
    """Loads what LLM needs when it is first asked for."""
    if name != "LLM":
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return import_module(f"{isolation.LIB}.app.offline.llm").LLM
