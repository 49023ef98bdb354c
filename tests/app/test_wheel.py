"""An installed Penstock: a wheel, in a virtual environment of its own, beside packages that have the names of ours."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from hatch_build import platform_tag
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.app.bench.server_process import ServerProcess
from penstock.engine.kernels.cpu.build import TIMEOUT_S
from penstock.engine.kernels.cpu.build import build as build_library
from penstock.engine.kernels.cpu.levels import Machine, this_machine

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "penstock"
KERNELS = "penstock/engine/kernels/cpu/prebuilt"

# Every process of the environment writes down, as it ends, which modules it had and from where.
REPORT = """
import atexit, json, os, sys

@atexit.register
def report():
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    with open(os.path.join(os.environ["REPORTS"], f"{os.getpid()}.json"), "w") as file:
        json.dump(files, file)
"""


def build(target: str, source: Path, folder: Path, **variables: str) -> Path:
    """Builds a wheel or a source distribution; without variables, a wheel has no kernels."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        env=os.environ | (variables or {"HATCH_BUILD_NO_HOOKS": "1"}),
    )
    (path,) = folder.iterdir()
    return path


def links() -> set[str]:
    """The packages, and the page, that penstock/ links to."""
    return {path.name for path in PACKAGE.iterdir() if path.is_symlink()}


def program_files() -> set[str]:
    """Where each file of the program lies in a wheel, and in a checkout, through the links in penstock/."""
    folders = [PACKAGE, *(PACKAGE / name for name in links())]
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__" and path.name != "README.md"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as packed:
        return set(packed.namelist())


def test_a_wheel_holds_the_whole_program_under_one_name(wheel: Path) -> None:
    names = names_in(wheel)
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == program_files()
    assert "penstock/app/demo/model/model.safetensors" in names
    assert "penstock/static/index.html" in names


def unpacked(archive: Path, folder: Path) -> Path:
    """Returns the one folder in an archive, once it is unpacked."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python has from 3.11.4 on
        packed.extractall(folder)
    (unpacked_folder,) = folder.iterdir()
    return unpacked_folder


@pytest.mark.long("wheels built and installed")
def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    for name in ("sdist", "source", "wheel"):
        (tmp_path / name).mkdir()
    source = unpacked(build("sdist", ROOT, tmp_path / "sdist"), tmp_path / "source")
    assert names_in(build("wheel", source, tmp_path / "wheel")) == names_in(wheel)


def fake_compiler(folder: Path, target: str, content: str) -> dict[str, str]:
    """Variables that name a compiler for a target, whose libraries have that content."""
    path = folder / "c++"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
*-dumpmachine*) echo {target}-linux-gnu ;;
*-mamx-tile*) echo "error: no tiles" >&2; exit 1 ;;
*) while [ $# -gt 1 ]; do [ "$1" = -o ] && printf '{content}' > "$2"; shift; done ;;
esac
"""
    )
    path.chmod(0o755)
    return {"CXX": str(path), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.long("wheels built and installed")
@pytest.mark.parametrize(
    ("target", "needs", "tag", "levels"),
    [
        ("x86_64", "GLIBC_2.28", "manylinux_2_28", {"portable", "avx2", "avxvnni", "avx512", "avx512bf16"}),
        ("aarch64", "GLIBC_2.17\\0GLIBCXX_3.4.30", "linux", {"portable", "neon", "dotprod"}),
        ("aarch64", "no version of the GNU C library", "linux", {"portable", "neon", "dotprod"}),
    ],
)
def test_a_wheel_has_the_levels_that_the_compiler_can_build_and_the_tag_that_they_allow(
    tmp_path: Path, target: str, needs: str, tag: str, levels: set[str]
) -> None:
    path = build("wheel", ROOT, tmp_path / "wheel", **fake_compiler(tmp_path, target, f"\\0{needs}\\0"))
    assert path.name.endswith(f"-py3-none-{tag}_{target}.whl")
    added = names_in(path) - program_files()
    kernels = {name.split("/")[-1] for name in added if name.startswith(f"{KERNELS}/native-linux-{target}-")}
    assert {name.split("-")[3] for name in kernels} == levels
    assert {name.split("/")[0] for name in added if name.split("/")[-1] not in kernels} == {
        "penstock-0.1.0.dist-info"
    }


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a compiler"
)
def test_the_library_of_this_machine_needs_nothing_newer_than_its_tag_promises() -> None:
    machine = this_machine()
    path = build_library(machine.usable()[0], print)
    assert platform_tag([path], machine.architecture) == f"manylinux_2_28_{machine.architecture}"


def test_without_a_compiler_a_wheel_is_for_every_platform(tmp_path: Path) -> None:
    path = build("wheel", ROOT, tmp_path, PATH="/nowhere", CXX="")
    assert path.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(path) if name.startswith(f"{KERNELS}/")]


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel, and a working folder."""

    site_packages: Path
    bin: Path
    work: Path
    reports: Path

    def modules(self) -> set[tuple[str, str]]:
        """The program's modules that the ended processes had, and where from; forgets them."""
        found: set[tuple[str, str]] = set()
        for path in self.reports.iterdir():
            found.update((name, str(file)) for name, file in json.loads(path.read_text()).items())
            path.unlink()
        ours = {"penstock", *links()}
        return {(name, file) for name, file in found if name.split(".")[0] in ours}

    def assert_only_installed(self, *expected: str) -> None:
        """The processes imported the expected modules, and all of the program's from the wheel."""
        modules = self.modules()
        assert set(expected) <= {name for name, _ in modules}
        home = self.site_packages / "penstock"
        assert {name: file for name, file in modules if home not in Path(file).parents} == {}


def add_others(folder: Path) -> None:
    """Somebody else's packages, with the names of ours."""
    for name in links():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(
            f"raise ImportError('this is not the {name} of Penstock')\n"
        )


def install(wheel: Path, folder: Path) -> Installed:
    """A virtual environment with a wheel; what the wheel depends on is this environment's."""
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--ignore-installed")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (site_packages,) = (folder / "venv" / "lib").glob("*/site-packages")
    # A .pth file in a folder that a .pth file names is not read: the checkout's own installation stays out.
    dependencies = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "tests.pth").write_text("\n".join([*dependencies, "import report"]))
    (site_packages / "report.py").write_text(REPORT)
    add_others(site_packages)
    for name in ("work", "reports"):
        (folder / name).mkdir()
    add_others(folder / "work")
    return Installed(site_packages, python.parent, folder / "work", folder / "reports")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def installed(environment: Installed, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """The environment, with its working folder as this process's."""
    monkeypatch.chdir(environment.work)
    monkeypatch.setenv("PYTHONPATH", str(environment.work))
    monkeypatch.setenv("REPORTS", str(environment.reports))
    return environment


@pytest.fixture
def server(installed: Installed) -> Iterator[ServerProcess]:
    with ServerProcess(command=(str(installed.bin / "penstock"), "serve")) as running:
        yield running


def answer(server: ServerProcess, method: str, path: str, body: object = None) -> bytes:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content
    finally:
        connection.close()


@pytest.mark.long("wheels built and installed")
def test_it_serves_the_demo_model_and_the_page(server: ServerProcess, installed: Installed) -> None:
    body = {"model": "penstock-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    reply = json.loads(answer(server, "POST", "/v1/chat/completions", body))
    assert reply["choices"][0]["message"]["content"]
    assert answer(server, "GET", "/") == (ROOT / "static" / "index.html").read_bytes()
    assert server.stop() == 0, server.log
    installed.assert_only_installed(
        "penstock.app.server", "penstock.gateway.service", "penstock.priority.queue", "penstock.engine.engine"
    )


def compiler_for(machine: Machine, folder: Path) -> dict[str, str]:
    """Variables that name the usual compiler, less the flags of the levels that a machine lacks."""
    known = {flag for level in machine.usable() for flag in level.flags}
    refused = sorted({flag for level in machine.levels for flag in level.flags} - known)
    path = folder / "compilers" / "c++"
    path.parent.mkdir()
    cases = "".join(f'*" {flag} "*) echo "error: no {flag}" >&2; exit 1 ;;\n' for flag in refused)
    path.write_text(f'#!/bin/sh\ncase " $* " in\n{cases}esac\nexec {shutil.which("c++")} "$@"\n')
    path.chmod(0o755)
    return {"CXX": "", "PATH": f"{path.parent}:{os.environ['PATH']}"}


@pytest.mark.long("wheels built and installed")
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a compiler"
)
def test_a_wheel_of_the_source_distribution_has_native_kernels_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this machine, which are built for other tests, too; and whatever else has been built here."""
    source = unpacked(build("sdist", ROOT, tmp_path / "sdist"), tmp_path / "source")
    machine = this_machine()
    wheel = build("wheel", source, tmp_path / "wheel", **compiler_for(machine, tmp_path))
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine.architecture}.whl")
    kernels = [name.split("/")[-1] for name in names_in(wheel) if name.startswith(f"{KERNELS}/")]
    assert {name.split("-")[3] for name in kernels} >= {level.name for level in machine.usable()}

    (tmp_path / "venv").mkdir()
    environment = install(wheel, tmp_path / "venv")
    for name, value in {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REPORTS", str(environment.reports))
    for name in ("CXX", "PENSTOCK_KERNELS", "PENSTOCK_CPU_ISA", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    command = [str(environment.bin / "penstock")]
    doctor = subprocess.run([*command, "doctor", "--port", "0"], capture_output=True, text=True, check=True)
    assert f"native, {machine.usable()[0].name}: " in doctor.stdout
    with ServerProcess(command=(*command, "serve")) as server:
        body = {"model": "penstock-demo", "prompt": "Once upon a", "max_tokens": 4, "temperature": 0}
        assert (
            json.loads(answer(server, "POST", "/v1/completions", body))["choices"][0]["text"] == " time, in a"
        )
        assert server.stop() == 0
    assert not [line for line in server.lines if "CPU kernels" in line], "it builds none, and lacks none"


@pytest.mark.long("wheels built and installed")
def test_the_processes_that_bench_starts_are_of_the_same_wheel(installed: Installed, tmp_path: Path) -> None:
    model = ensure_checkpoint(LLAMA_TINY, tmp_path)
    options = ["--quick", "--only", "http", "--streams", "1", "--dtype", "float32", "--model", str(model)]
    done = subprocess.run(
        [str(installed.bin / "python"), "-m", "penstock", "bench", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "llama-tiny, float32, 1" in done.stdout
    installed.assert_only_installed("penstock.app.bench.runs", "penstock.app.server")


PROGRAM = """
import sys

import app
import penstock

assert app.WHOSE == "mine"
assert not {"torch", "pydantic", "rich"} & sys.modules.keys()

from penstock import LLM

import engine.parts

with LLM(progress=False, num_blocks=64) as llm:
    print(llm.generate("Once upon a", temperature=0, max_tokens=4)[0].text)

import app.late

assert engine.parts.WHOSE == app.late.WHOSE == "mine"
assert {name for name in sys.modules if name.split(".")[0] in NAMES} == {"app", "app.late", "engine", "engine.parts"}
assert {"penstock.app.offline.llm", "penstock.engine.execution.runner"} < sys.modules.keys()
"""


@pytest.mark.long("wheels built and installed")
def test_it_is_a_library_in_a_program_that_has_packages_of_the_same_names(
    installed: Installed, tmp_path: Path
) -> None:
    for name, module in (("app", "late"), ("engine", "parts")):
        (tmp_path / name).mkdir()
        for file in ("__init__.py", f"{module}.py"):
            (tmp_path / name / file).write_text("WHOSE = 'mine'")
    (tmp_path / "program.py").write_text(f"NAMES = {links()}\n{PROGRAM}")
    done = subprocess.run(
        [str(installed.bin / "python"), str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == " time, in a\n"
    installed.modules()  # forgotten: some are the program's own
