"""The image's steps as a script: the Dockerfile is read as it is, and steps stay in the folder that stands for `/`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deploy.image_steps import DOCKERFILE, ROOT, Build, State, chain, context, parse

SMALL = """
# What is built here is taken to an image without a compiler.
ARG VERSION=1
FROM paper:${VERSION} AS build
ENV TOOLS=/opt/tools PATH=/opt/tools/bin:$PATH
WORKDIR /src
COPY . .
ARG GREETING=hello
RUN mkdir -p /opt/tools/bin /var/lib/lists && touch /var/lib/lists/one && rm -rf /var/lib/lists/* && \\
    ! command -v g++ && apt-get install --yes g++ && command -v g++ && \\
    echo "echo $GREETING" > /opt/tools/bin/greet && chmod +x /opt/tools/bin/greet

FROM paper:${VERSION} AS last
RUN useradd --uid 10001 --create-home somebody
COPY --from=build /opt/tools /opt/tools
ENV PATH=/opt/tools/bin:$PATH
RUN greet > /home/somebody/said && ! command -v g++
ENTRYPOINT ["greet"]
EXPOSE 8000
"""


def test_the_dockerfiles_stages_stand_on_each_other() -> None:
    stages = parse(DOCKERFILE.read_text())
    names = {target: [stage.name for stage in chain(stages, target)] for target in ("cpu", "cuda")}
    assert names == {
        "cpu": ["base", "torch-cpu", "build-cpu", "cpu"],
        "cuda": ["base", "torch-cuda", "build-cuda", "cuda"],
    }
    assert stages["base"].base.startswith("python:3.")


def test_the_build_is_sent_what_is_installed_and_nothing_else() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in context()}
    assert {"pyproject.toml", "requirements.lock", "penstock/__main__.py", "static/index.html"} < files
    assert {"app/demo/model/model.safetensors", "engine/kernels/cpu/api.cpp"} < files
    assert not [
        name for name in files if name.startswith(("tests/", "deploy/", ".")) or "__pycache__" in name
    ]
    assert not [name for name in files if name.startswith("engine/kernels/cpu/prebuilt/")]


def test_every_copied_source_is_sent() -> None:
    files = {path.relative_to(ROOT) for path in context()}
    copied = [
        Path(source)
        for stage in parse(DOCKERFILE.read_text()).values()
        for step in stage.steps
        if step.word == "COPY" and "--from" not in step.text
        for source in step.text.split()[:-1]
    ]
    assert len(copied) > 3
    assert [source for source in copied if not any(file.is_relative_to(source) for file in files)] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, State, Path]:
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    for name in ("kept", "hidden"):
        (source / name).mkdir(parents=True)
        (source / name / "file").write_text(name)
    (source / ".dockerignore").write_text("*\n!kept\n")
    build = Build(folder, parse(SMALL), source)
    return build, build.make("last"), folder


def test_steps_are_run_in_the_folder_that_stands_for_the_root(made: tuple[Build, State, Path]) -> None:
    build, state, folder = made
    assert (build.root / "home" / "somebody" / "said").read_text() == "hello\n"
    assert not (build.root / "src").exists()
    before = folder / "stages" / "build"
    assert sorted(path.name for path in (before / "src").iterdir()) == ["kept"]
    assert list((before / "var" / "lib" / "lists").iterdir()) == []
    assert state.settings == {"ENTRYPOINT": '["greet"]', "EXPOSE": "8000"}


def test_what_runs_in_the_image_finds_no_compiler(made: tuple[Build, State, Path]) -> None:
    build, state, _ = made
    path = build.environment(state)["PATH"]
    assert path.startswith(f"{build.root}/opt/tools/bin:")
    assert os.pathsep.join(path.split(os.pathsep)[1:]).startswith(f"{build.root}/usr/bin:")
    assert shutil.which("greet", path=path)
    assert shutil.which("sh", path=path)
    for compiler in ("c++", "cc", "g++", "gcc", "clang++", "x86_64-linux-gnu-g++"):
        assert shutil.which(compiler, path=path) is None


@pytest.mark.parametrize(
    ("step", "message"), [("COPY nothing .", "is sent no nothing"), ("ADD kept /", "no such step is known")]
)
def test_what_cannot_be_done_is_said(tmp_path: Path, step: str, message: str) -> None:
    (tmp_path / ".dockerignore").write_text("")
    (tmp_path / "build").mkdir()
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        Build(tmp_path / "build", parse(f"FROM paper AS one\n{step}\n"), tmp_path).make("one")
