"""The image without a container engine: `python -m deploy.image_steps [--target cpu] [--borrow]`.

Runs the Dockerfile's own steps, stage by stage, in a temporary folder that stands for `/`: absolute paths of steps are
taken to lie in it. Programs are this machine's, less its compilers: a stage has one once its apt-get installed it.
Then the server is started as the image would start it, and asked once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from app.bench.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

_PATH = re.compile(r"(?<![\w./}])/(?!dev/)(?=\w)")
"""Where an absolute path starts."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_COMPILER = re.compile(r"(.*-)?(c\+\+|cc|g\+\+|gcc|clang|clang\+\+)(-[\d.]+)?")
_COMPILERS = {"g++": ("g++", "c++", "gcc", "cc"), "gcc": ("gcc", "cc")}
"""Commands that a package brings."""
_PASSED_ON = ("PIP_", "HTTP", "http", "NO_PROXY", "no_proxy", "SSL_", "REQUESTS_")
"""Starts of the names of variables that say where packages are."""
_SETTINGS = ("ENTRYPOINT", "CMD", "HEALTHCHECK", "EXPOSE", "USER", "STOPSIGNAL", "VOLUME")
"""Steps that change no file."""


@dataclass(frozen=True, slots=True)
class Step:
    word: str
    text: str


@dataclass(frozen=True, slots=True)
class Stage:
    """`base` is another stage, or an image."""

    name: str
    base: str
    steps: tuple[Step, ...]


@dataclass(slots=True)
class State:
    """What a stage leaves beside its files."""

    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    settings: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile, by name."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    steps = [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    starts = [number for number, step in enumerate(steps) if step.word == "FROM"]
    arguments = _pairs(" ".join(step.text for step in steps[: starts[0]]))
    stages = {}
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        base, _, name = steps[start].text.partition(" AS ")
        stages[name] = Stage(name, _filled(base, arguments), tuple(steps[start + 1 : end]))
    return stages


def chain(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """The stages that a target needs, in an order in which they can be made."""
    stage = stages[target]
    needed = [
        stage.base,
        *(found for step in stage.steps for found in re.findall(r"--from=(\S+)", step.text)),
    ]
    found = [one for name in needed if name in stages for one in chain(stages, name)]
    return [*dict.fromkeys(found), stage]


def context(root: Path = ROOT) -> Iterator[Path]:
    """The files that .dockerignore lets in, below `root`."""
    rules = [line for line in (root / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if not _is_ignored(path.relative_to(root), rules):
                yield from walk(path) if path.is_dir() else (path,)

    return walk(root)


def _is_ignored(path: Path, rules: list[str]) -> bool:
    """The last rule that fits the path, or a folder that it lies in, says."""
    places = [part.as_posix() for part in (path, *path.parents)]
    fitting = [rule for rule in rules if any(_fits(place, rule.lstrip("!")) for place in places)]
    return bool(fitting) and not fitting[-1].startswith("!")


def _fits(place: str, rule: str) -> bool:
    is_anywhere = rule.startswith("**/")
    return fnmatchcase(place.rsplit("/", 1)[-1] if is_anywhere else place, rule.removeprefix("**/"))


class Build:
    """A folder in which stages are made, each at the same path in its turn: what is installed knows where it lies."""

    def __init__(
        self,
        folder: Path,
        stages: Mapping[str, Stage],
        root: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are set for every step, beside its own."""
        self._stages = stages
        self._source = root
        self._files = folder / "stages"
        self._files.mkdir()
        self._variables = dict(variables or {})
        self.root = folder / "root"
        """Of the stage that is made, or was made last."""
        self._tools = _tools(folder / "tools", self.root)
        self._states: dict[str, State] = {}

    def make(self, target: str) -> State:
        for stage in chain(self._stages, target):
            self._states[stage.name] = self._make(stage)
        return self._states[target]

    def environment(self, state: State) -> dict[str, str]:
        """Of a process in the image."""
        path = state.variables.get("PATH", self._path)
        return {"HOME": f"{self.root}/home", **state.variables, "PATH": path, **self._variables}

    @property
    def _path(self) -> str:
        return f"{self.root}/usr/bin:{self._tools}"

    def _make(self, stage: Stage) -> State:
        files, state = self._files / stage.name, State()
        if stage.base in self._states:
            before = self._states[stage.base]
            state = replace(before, variables=dict(before.variables), settings=dict(before.settings))
            _link_all(self._files / stage.base, files)
        else:
            for name in ("usr/bin", "home", "tmp"):
                (files / name).mkdir(parents=True)
        self.root.unlink(missing_ok=True)
        self.root.symlink_to(files)
        arguments: dict[str, str] = {}
        for step in stage.steps:
            started_s = time.monotonic()
            self._do(step, state, arguments)
            print(f"{time.monotonic() - started_s:6.1f} s  {stage.name}: {step.word} {step.text}", flush=True)
        return state

    def _do(self, step: Step, state: State, arguments: dict[str, str]) -> None:
        text = self._inside(step.text)
        match step.word:
            case "ARG":
                arguments |= _pairs(text)
            case "ENV":
                known = {"PATH": self._path, **state.variables}
                state.variables |= {name: _filled(value, known) for name, value in _pairs(text).items()}
            case "WORKDIR":
                state.folder = text
                Path(text).mkdir(parents=True, exist_ok=True)
            case "RUN":
                environment = {**_passed_on(), **self.environment(state), **arguments}
                folder = self.root if state.folder == "/" else state.folder
                subprocess.run(["/bin/sh", "-ec", text], cwd=folder, env=environment, check=True)
            case "COPY":
                self._copy(step.text, state)
            case word if word in _SETTINGS:
                state.settings[word] = step.text
            case word:
                raise ValueError(f"{word} {step.text}: no such step is known here")

    def _copy(self, text: str, state: State) -> None:
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        place = Path(state.folder) / self._inside(target)
        stage = re.search(r"--from=(\S+)", text)
        for source in sources:
            if stage is not None:
                _link_all(self._files / stage[1] / source.lstrip("/"), place)
                continue
            files = [path for path in context(self._source) if path.is_relative_to(self._source / source)]
            if not files:
                raise FileNotFoundError(f"COPY {text}: the build is sent no {source}")
            for path in files:
                copied = place / path.relative_to(self._source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)

    def _inside(self, text: str) -> str:
        return _PATH.sub(f"{self.root}/", text)


def _link_all(source: Path, target: Path) -> None:
    """As good as a copy, for what installs files replaces those that there are."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link, dirs_exist_ok=True)


def _tools(folder: Path, root: Path) -> Path:
    """This machine's programs less its compilers, and stand-ins for what needs rights or changes the machine."""
    folder.mkdir()
    for source in map(Path, ("/usr/bin", "/bin")):
        for path in source.iterdir():
            if not _COMPILER.fullmatch(path.name) and not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)
    brought = " ".join(
        f"{package}) for name in {' '.join(names)}; do ln -sf $(command -v /usr/bin/$name) {root}/usr/bin; done;;"
        for package, names in _COMPILERS.items()
    )
    scripts = {
        "apt-get": f'for package; do case "$package" in {brought} esac; done',
        "useradd": f'for name; do :; done; mkdir -p "{root}/home/$name"',
        "chown": "exit 0",
        "python": f'exec {shlex.quote(os.path.realpath(sys.executable))} "$@"',
    }
    for name, script in scripts.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def _pairs(text: str) -> dict[str, str]:
    """`A=1 B=2`."""
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(text))}


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], text)


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}


def borrowed(folder: Path) -> dict[str, str]:
    """Variables with which pip and Python find this environment's packages, all but Penstock, and fetch none."""
    folder.mkdir()
    for path in (path for source in site.getsitepackages() for path in Path(source).iterdir()):
        if not path.name.startswith(("penstock", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    # Of the last, pip takes what the variable's name denies: 0 is no isolation.
    return {
        "PYTHONPATH": str(folder),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }


def ask(build: Build, state: State) -> str:
    """Starts what the image starts, looks at its health as the image does, and has it answer one chat.

    Raises:
        RuntimeError: it does not answer, has no native kernels, or does not end well.
    """
    variables = build.environment(state)
    pairs = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in variables.items())]
    command = json.loads(state.settings["ENTRYPOINT"]) + json.loads(state.settings["CMD"])
    with ServerProcess(command=(*pairs, *command)) as server:
        body = {
            "model": "penstock-demo",
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 20,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer: str = json.load(reply)["choices"][0]["message"]["content"]
        check = state.settings["HEALTHCHECK"].partition(" CMD ")[2]
        check = check.replace(f":{state.settings['EXPOSE']}/", f":{server.port}/")
        subprocess.run([*pairs, *json.loads(check)], check=True)
        if server.stop() or "no native CPU kernels" in server.log:
            raise RuntimeError(server.log)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="cpu")
    parser.add_argument(
        "--borrow", action="store_true", help="take dependencies from this environment: fetch nothing"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-image-") as name:
        folder = Path(name)
        variables = borrowed(folder / "borrowed") if options.borrow else {}
        build = Build(folder, parse(DOCKERFILE.read_text()), variables=variables)
        state = build.make(options.target)
        print(f"it answers: {ask(build, state)}")


if __name__ == "__main__":
    main()
