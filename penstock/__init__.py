"""Penstock's one name in site-packages: the command starts here and finds the program's packages."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent

# A wheel holds app/, gateway/, priority/, engine/ and static/ in penstock/lib; in a checkout they lie beside penstock/.
PACKAGES = _HERE / "lib" if (_HERE / "lib").is_dir() else _HERE.parent
