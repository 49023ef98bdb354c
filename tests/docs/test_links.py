"""Targets of the Markdown are there: links, files, flags, variables, names in the code, and code that parses."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import yaml

from docs.generate import FOLDER, parser_of
from penstock.app.settings import ENV_PREFIX, Settings, flag
from penstock.engine.kernels.cpu import levels, prebuilt
from tests.docs.markdown import ROOT, Page, pages, tracked
from tests.engine.kernels.levels import ARM_VARIABLE

every_page = pytest.mark.parametrize("page", pages(), ids=str)

SOURCES = {
    ".py",
    ".h",
    ".cpp",
    ".js",
    ".css",
    ".html",
    ".json",
    ".yml",
    ".yaml",
    ".toml",
    ".conf",
    ".service",
    "",
}
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
IDENTIFIER = re.compile(r"(?=\w*_|\w*[a-z][A-Z])[A-Za-z_]\w*")
FOLDERS = {path.relative_to(ROOT).parts[0] for path in tracked() if path.parent != ROOT}
PACKAGES = sorted(name for name in FOLDERS if (ROOT / name / "__init__.py").exists())
ELSEWHERE = {
    *("ext_authz", "json_slices", "sm_86", "input_global_scale", "activation_scale", "tile_packed_to_4d"),
    *("--build-arg", "build"),
    *("--max-num-queued-tokens", "--max-num-queued-reqs", "--max-queued-requests", "OLLAMA_MAX_QUEUE"),
}
"""Names of other programs and of cards."""


@every_page
def test_links_lead_somewhere(page: Page) -> None:
    assert [link for link in page.links if not leads_somewhere(page, link)] == []


@every_page
def test_files_in_backticks_are_there(page: Page) -> None:
    assert [name for name in page.spans if PATH.fullmatch(name) and not is_there(page, name)] == []


@every_page
def test_names_in_backticks_stand_in_the_code(page: Page) -> None:
    names = {span.removesuffix("()") for span in page.spans} - ELSEWHERE - file_names()
    dotted = re.compile(rf"(?!penstock)({'|'.join(PACKAGES)})(\.\w+)+")
    # A page may leave out the package that it is about.
    around = page.path.parent.name
    full = {name for name in names if dotted.fullmatch(name)}
    assert [name for name in full if resolve(name) is None and resolve(f"{around}.{name}") is None] == []
    parts = {part for name in names if PATH.fullmatch(name) and "/" not in name for part in name.split(".")}
    assert [part for part in parts if IDENTIFIER.fullmatch(part) and part not in words()] == []


@every_page
def test_members_of_classes_are_theirs(page: Page) -> None:
    named = {tuple(span.split(".")) for span in page.spans if re.fullmatch(r"[A-Z]\w+\.[a-z_]\w+", span)}
    assert [f"{name}.{member}" for name, member in named if member not in classes().get(name, ())] == []


@every_page
def test_modules_that_are_run_are_there(page: Page) -> None:
    modules = set(re.findall(r"python -m ([a-z]\w*(?:\.\w+)*)", page.text)) - ELSEWHERE
    assert [module for module in modules if find_spec(module) is None] == []


@every_page
def test_variables_are_settings(page: Page) -> None:
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}
    known |= {levels.VARIABLE, prebuilt.VARIABLE, ARM_VARIABLE}
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", page.text)) <= known


@every_page
def test_commands_and_their_flags_exist(page: Page) -> None:
    lines = [line for _, block in page.blocks for line in block.replace("\\\n", "").splitlines()]
    shown = [re.match(r"\s*(?:\.venv/bin/)?penstock ([a-z][^#&]*)", text) for text in page.spans + lines]
    assert [command[1] for command in shown if command and not exists(command[1])] == []


@every_page
def test_flags_in_backticks_exist(page: Page) -> None:
    flags = {span.split()[0].partition("=")[0] for span in page.spans if span.startswith("--")} - ELSEWHERE
    assert flags <= all_flags()


@every_page
def test_blocks_of_code_parse(page: Page) -> None:
    for language, text in page.blocks:
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "json":
            json.loads(text)
        elif language == "toml":
            tomllib.loads(text)
        elif language in ("yaml", "yml"):
            list(yaml.safe_load_all(text))
        elif language in ("sh", "bash"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@every_page
def test_blocks_of_code_are_whole(page: Page) -> None:
    """A line of prose right above an indented one is a block whose first line lost its indentation."""
    lines = page.prose.splitlines()
    pairs = pairwise(lines)
    assert [above for above, line in pairs if line.startswith("    ") and re.match(r"[^\s|*>-]", above)] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert text.count("\n") <= 130


def leads_somewhere(page: Page, link: str) -> bool:
    place, _, anchor = link.partition("#")
    if re.match(r"\w+:", place):
        return True
    target = (page.path.parent / place).resolve() if place else page.path
    return target.exists() and (not anchor or anchor in Page(target).anchors)


def is_there(page: Page, name: str) -> bool:
    """Whether a name that looks like a file or a folder of the repository is one, or one that git ignores."""
    is_file = re.search(r"\.(py|h|cpp|js|md|toml|yml|yaml|conf|service)$", name)
    if "/" not in name:
        return not is_file or name in file_names()
    if not is_file and name.split("/")[0] not in FOLDERS:
        return True
    # A page may leave out the package that it is about.
    places = [ROOT, page.path.parent, *(ROOT / package for package in PACKAGES)]
    ignored = (ROOT / ".gitignore").read_text().split()
    return any((place / name).exists() for place in places) or f"{name.rstrip('/')}/" in ignored


@cache
def file_names() -> frozenset[str]:
    return frozenset(path.name for path in tracked())


def resolve(name: str) -> Any:
    """The module, or what of a module, that a dotted name means."""
    module, _, member = name.rpartition(".")
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return getattr(resolve(module), member, None) if module else None


@cache
def classes() -> dict[str, set[str]]:
    """The names in the bodies of classes, by the classes' names."""
    found: dict[str, set[str]] = {}
    for path in tracked():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(re.findall(r"\w+", ast.unparse(node)))
    return found


@cache
def words() -> frozenset[str]:
    """All words of the sources, and the full names of metrics and settings."""
    sources = (path for path in tracked() if path.suffix in SOURCES or path.parent == FOLDER)
    found = {word for path in sources for word in re.findall(r"\w+", path.read_text(errors="ignore"))}
    metrics = (word for word in found if word.startswith("penstock_"))
    return frozenset(
        found | {f"{name}_{suffix}" for name in metrics for suffix in ("total", "sum", "count", "bucket")}
    )


def exists(command: str) -> bool:
    """Whether `penstock` has the command, and the command the flags that follow it."""
    words = command.split()
    depth = 2 if words[0] == "cluster" and words[1:] and words[1].islower() else 1
    try:
        parser = parser_of(words[:depth])
    except AttributeError:
        return False
    flags = {flag for action in parser._actions for flag in action.option_strings}
    return set(re.findall(r"(?<!\S)--[a-z][\w-]*", command)) <= flags


@cache
def all_flags() -> frozenset[str]:
    """The flags of all that is run by a command line, the repository's own tools included."""
    programs = (path.read_text() for path in tracked() if path.suffix == ".py" and path.parts[-2] != "docs")
    own = {flag for program in programs for flag in re.findall(r"[\"'](--[a-z][\w-]*)", program)}
    return frozenset(own | {flag(name) for name in Settings.model_fields} | {"--help"})
