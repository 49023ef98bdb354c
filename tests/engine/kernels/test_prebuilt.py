"""Libraries that were compiled ahead of time: found without a compiler, and ignored where they do not fit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from penstock.engine.kernels.cpu import build, library, prebuilt, structs
from penstock.engine.kernels.cpu.levels import LEVELS, Level, this_machine
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library

KNOWN, FAST = Level("known", (), (), "what every compiler knows"), Level("fast", ("-mfast",), (), "the best")
STUBS = "\n".join(
    f'__attribute__((visibility("default"))) void {name}() {{}}'
    for name in library.SIGNATURES
    if name != "penstock_sizes"
)
SIZES = """
__attribute__((visibility("default"))) const int* penstock_sizes() {{
    static const int sizes[] = {{{}}};
    return sizes;
}}"""
"""The sizes of the structures, which end with 0."""
FITTING = SIZES.format(", ".join(str(ctypes.sizeof(struct)) for struct in structs.ALL) + ", 0")


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small sources of a library that has every function and does nothing; the cache is empty."""
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "api.cpp").write_text(f'extern "C" {{\n{STUBS}{FITTING}\n}}\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_levels(monkeypatch, KNOWN)
    return folder


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of prebuilt libraries."""
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def use_levels(monkeypatch: pytest.MonkeyPatch, *levels: Level) -> None:
    """Gives this machine's architecture other levels, the slowest first."""
    monkeypatch.setitem(LEVELS, this_machine().architecture, levels)


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "other"))


def load() -> tuple[library.NativeLibrary | None, list[str]]:
    said: list[str] = []
    try:
        return load_library(said.append), said
    except NativeUnavailable as error:
        return None, [*said, str(error)]


def test_it_is_found_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path) -> None:
    path = prebuilt.make(KNOWN, place, print)
    assert list(place.iterdir()) == [path]
    without_compiler(monkeypatch, tmp_path)
    found, said = load()
    assert found is not None
    assert (found.path, found.level, said) == (str(path), "known", [])


def test_one_with_other_structures_is_refused(sources: Path, place: Path) -> None:
    (sources / "api.cpp").write_text(f'extern "C" {{\n{STUBS}{SIZES.format("8, 0")}\n}}\n')
    prebuilt.make(KNOWN, place, print)
    found, said = load()
    assert found is None
    assert said[-1].endswith("its structures are not those of this version")


def test_it_is_taken_before_the_compiler_is_asked(place: Path, tmp_path: Path) -> None:
    path = prebuilt.make(KNOWN, place, print)
    for built in (tmp_path / "cache" / "penstock").iterdir():
        built.unlink()
    found, said = load()
    assert found is not None
    assert (found.path, said) == (str(path), [])


def test_the_folder_in_the_package_is_the_one_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prebuilt.VARIABLE, raising=False)
    assert prebuilt.folder() == Path(prebuilt.__file__).parent / "prebuilt"


@pytest.mark.usefixtures("place")
def test_a_folder_with_nothing_that_fits_is_told() -> None:
    found, said = load()
    assert found is not None
    assert "has no CPU kernels for known" in said[0]
    assert "building" in said[1]


def test_one_of_other_sources_is_ignored_and_the_compiler_does_it(place: Path, sources: Path) -> None:
    path = prebuilt.make(KNOWN, place, print)
    (sources / "new.h").write_text("// changed\n")
    found, said = load()
    assert found is not None
    assert Path(found.path).parent != place
    assert [line for line in said if "ignored" in line] == [
        f"a prebuilt library of the CPU kernels is ignored: {path} was made from other sources"
    ]
    assert build.fingerprint(KNOWN) in prebuilt.make(KNOWN, place, print).name
    assert not path.exists()
    assert load()[1] == []


@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_one_that_was_cut_short_is_ignored(place: Path, kept: int) -> None:
    """It is never loaded: what a truncated library lacks would end the process where it is touched."""
    path = prebuilt.make(KNOWN, place, print)
    path.write_bytes(path.read_bytes()[:kept])
    found, said = load()
    assert found is not None
    assert Path(found.path).parent != place
    assert [line for line in said if "ignored" in line] == [
        f"a prebuilt library of the CPU kernels is ignored: {path} is broken, its checksum is another"
    ]


def test_one_that_cannot_be_loaded_is_ignored(place: Path) -> None:
    """It may need a newer C library than this machine has."""
    path = prebuilt.make(KNOWN, place, print)
    path.write_bytes(b"of another world")
    path.rename(place / f"{path.stem.rpartition('-')[0]}-{prebuilt._checksum(path)}.so")
    found, said = load()
    assert found is not None
    assert Path(found.path).parent != place
    assert "cannot load" in said[0]
    assert len([line for line in said if "ignored" in line]) == 1


def test_without_a_compiler_a_lower_level_that_is_prebuilt_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path
) -> None:
    use_levels(monkeypatch, KNOWN, FAST)
    prebuilt.make(KNOWN, place, print)
    without_compiler(monkeypatch, tmp_path)
    found, said = load()
    assert found is not None
    assert found.level == "known"
    assert said[-1].startswith("CPU kernels for known serve in place of fast: no C++ compiler")


def test_a_compiler_that_is_too_old_builds_a_lower_level(monkeypatch: pytest.MonkeyPatch) -> None:
    use_levels(monkeypatch, KNOWN, FAST)
    found, said = load()
    assert found is not None
    assert found.level == "known"
    (line,) = [line for line in said if "in place of fast" in line]
    assert "too old for fast" in line
    assert "-mfast" in line


def test_a_compiler_that_fails_is_not_asked_for_every_level(
    monkeypatch: pytest.MonkeyPatch, sources: Path
) -> None:
    use_levels(monkeypatch, KNOWN, KNOWN)
    (sources / "api.cpp").write_text("no C++\n")
    found, said = load()
    assert found is None
    assert len([line for line in said if "building" in line]) == 1
    assert "error:" in said[-1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="--out can name another folder"):
        prebuilt.make(KNOWN, tmp_path / "file", print)


def test_the_fingerprint_is_of_sources_flags_and_level_and_not_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, sources: Path
) -> None:
    digests = {build.fingerprint(KNOWN)}
    monkeypatch.setenv("CXX", "another")
    assert {build.fingerprint(KNOWN)} == digests
    digests.add(build.fingerprint(FAST))
    (sources / "new.h").write_text("")
    digests.add(build.fingerprint(KNOWN))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    digests.add(build.fingerprint(KNOWN))
    assert len(digests) == 4
