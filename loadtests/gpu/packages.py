"""What has to be importable, and how it gets here without a network: as wheels beside this file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(__file__).parent / "wheels"

NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "anyio": "anyio",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "redis": "redis",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "jinja2": "jinja2",
    "rich": "rich",
    "httpx": "httpx",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "transformers": "transformers",
}
"""Modules, and what each is called in a package index."""

ON_CUDA = {"triton": "triton"}
"""More that are needed where there is a GPU."""


class PackagesMissing(RuntimeError):
    """One line for each of them, and how to bring them."""


def prepare(target: Path, say: Callable[[str], None], wheels: Path = WHEELS) -> None:
    """Puts the repository and the wheels that are missing here on the path, of this process and those it starts.

    Args:
        target: an empty folder for what the wheels hold.

    Raises:
        PackagesMissing: something is still not there.
    """
    _extend_path(ROOT)
    wanted = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel)]
    if wanted:
        say(f"unpacking {len(wanted)} wheels")
        _install(wanted, target)
        _extend_path(target)
    if missing := missing_packages(NEEDED):
        raise PackagesMissing(advice(missing))
    if broken := [line for module in NEEDED if (line := _import_error(module))]:
        raise PackagesMissing("\n".join(broken))


def missing_packages(needed: dict[str, str]) -> list[str]:
    return [name for module, name in needed.items() if importlib.util.find_spec(module) is None]


def advice(missing: Sequence[str]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"{name} is missing" for name in missing]
    return "\n".join(
        [
            *lines,
            "on a machine with a network: pip download --only-binary=:all: "
            f"--python-version {version} --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "
            f"--dest loadtests/gpu/wheels {' '.join(missing)}; then copy the folder here",
        ]
    )


def _is_installed(wheel: Path) -> bool:
    """A wheel never takes the place of what the machine has."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(wheel.name.split("-")[0])
    except PackageNotFoundError:
        return False
    return True


def _import_error(module: str) -> str | None:
    """What a package lacks to be imported: one that it needs, or the right version of Python."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} is there and cannot be imported: {error}"
    return None


def _install(wheels: Sequence[Path], target: Path) -> None:
    """A wheel is a zip of what belongs on the path, and pip may not be there."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise PackagesMissing(f"{wheel} cannot be unpacked: {error}") from None


def _extend_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *known])
