"""Penstock's packages inside somebody else's program.

They import each other by short names, `from engine.engine import Engine`, which in that program may be other packages.
So there they are imported as `penstock.lib.engine` and so on, and a short name in one of their own import statements
stands for the long one. An import statement calls the `__import__` of its module's `__builtins__`, and these are what
its globals had under that name when it was executed (both documented, at `exec` and `__import__`). So nothing that
others see is changed: neither sys.path, nor the short names in sys.modules, nor the builtins of their modules.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

NAMES = frozenset({"app", "cluster", "gateway", "priority", "engine"})
LIB = "penstock.lib"


def install(packages: Path) -> None:
    """From now on `penstock.lib.app` and its siblings can be imported; `packages` is the folder that they lie in."""
    sys.meta_path.insert(0, _Finder(packages))


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Stands in for `__import__` in Penstock's own modules."""
    first = name.partition(".")[0]
    if level or first not in NAMES:
        return builtins.__import__(name, globals, locals, fromlist, level)
    module = builtins.__import__(f"{LIB}.{name}", globals, locals, fromlist, level)
    return module if fromlist else sys.modules[f"{LIB}.{first}"]


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, packages: Path) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == LIB:
            spec = ModuleSpec(LIB, None, is_package=True)
            spec.submodule_search_locations = [str(self._packages)]
            return spec
        if not fullname.startswith(f"{LIB}."):
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found
