"""Penstock's one name in site-packages: the command starts here, `from penstock import LLM`, and Ray Serve."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import isolation

if TYPE_CHECKING:
    from penstock.app.offline.llm import LLM

__all__ = ["LLM"]

_WHERE = {
    "LLM": "penstock.app.offline.llm",
    "replicas": "penstock.cluster.deployments",
    "switches": "penstock.cluster.deployments",
}
"""`penstock:replicas` and `penstock:switches` are what a config file of Ray Serve imports."""

_HERE = Path(__file__).resolve().parent

# A wheel holds app/, gateway/, priority/, engine/ and static/ in penstock/lib; in a checkout they lie beside penstock/.
PACKAGES = _HERE / "lib" if (_HERE / "lib").is_dir() else _HERE.parent

isolation.install(PACKAGES)


def __getattr__(name: str) -> object:
    """Loads what it needs when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(f"{isolation.LIB}.{_WHERE[name]}"), name)
