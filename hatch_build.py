"""Puts the native CPU kernels of every level into a wheel, so that whoever installs it needs no compiler."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS = "penstock/lib/engine/kernels/cpu/prebuilt"
MANYLINUX = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""The newest versions of symbols that a library for manylinux_2_28 may need."""
_VERSION = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)+)(?=\0)")


class KernelsHook(BuildHookInterface[Any]):
    """Compiles the levels of the architecture that the compiler is for; without a compiler the wheel is a pure one."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # a checkout compiles the one level that it uses
            return
        sys.path.insert(0, self.root)
        from penstock.engine.kernels.cpu.build import NativeUnavailable, find_compiler, target_of

        self._folder = TemporaryDirectory()
        try:
            target = target_of(find_compiler())
            libraries = self._build(Path(self._folder.name), target)
        except NativeUnavailable as error:
            self.app.display_warning(f"The wheel carries no native CPU kernels: {error}")
            return
        if libraries:
            build_data["force_include"][self._folder.name] = KERNELS
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries, target)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _build(self, folder: Path, target: str) -> list[Path]:
        """Builds what levels the compiler can, all at once: their units wait for processors."""
        from penstock.engine.kernels.cpu import prebuilt
        from penstock.engine.kernels.cpu.build import NativeUnavailable, side_by_side
        from penstock.engine.kernels.cpu.levels import Level, levels_of

        levels = levels_of(target)
        with ThreadPoolExecutor(len(levels)) as pool, side_by_side() as commands:

            def make(level: Level) -> Path | None:
                try:
                    return prebuilt.make(level, folder, self.app.display_info, target, commands)
                except NativeUnavailable as error:
                    self.app.display_warning(f"The wheel carries no CPU kernels for {level.name}: {error}")
                    return None

            return [path for path in pool.map(make, levels) if path is not None]


def platform_tag(libraries: Iterable[Path], target: str) -> str:
    """Names the oldest platform that has what the libraries need: manylinux_2_28, or one like this machine."""
    if sys.platform != "linux":
        return next(sys_tags()).platform
    needs = {
        (name.decode(), tuple(map(int, version.split(b"."))))
        for library in libraries
        for name, version in _VERSION.findall(library.read_bytes())
    }
    is_old = all(version <= NEWEST[name] for name, version in needs)
    is_glibc = any(name == "GLIBC" for name, _ in needs)
    return f"{MANYLINUX if is_old and is_glibc else 'linux'}_{target}"
