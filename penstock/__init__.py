"""Penstock's one name: the command starts here, `from penstock import LLM`, and Ray Serve.

The packages are folders of the checkout's root, and links in this folder, so that they are imported as
`penstock.engine` and so on in a checkout, in an editable install and in a wheel, which has folders
in place of the links.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.app.offline.llm import LLM

__all__ = ["LLM"]

_WHERE = {
    "LLM": "penstock.app.offline.llm",
    "prefill": "penstock.cluster.deployments",
    "replicas": "penstock.cluster.deployments",
    "switches": "penstock.cluster.deployments",
}
"""`penstock:replicas`, `penstock:prefill` and `penstock:switches` are what a config file of Ray Serve imports."""


def __getattr__(name: str) -> object:
    """Loads what it needs when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
