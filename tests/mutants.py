"""`make mutants FILES="gateway/access/quotas.py"`: which small changes of a file would no test notice?

    make mutants FILES="gateway priority" ARGS="--most 100 --seed 14"

Each mutant is one change of one expression, in a copy of the tree; the tests of the file's folder run on it, or those
given by `--tests`. FILES may be folders, too; `--most` mutants are drawn from all of them together. A mutant that
survives is printed: a test is missing, or the change changes nothing.

Tests run in a fork of this process, which has imported their libraries. Hypothesis does not shrink what it finds.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node in other ways, each with one change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            yield _with(node, ops=[_SWAPS[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPS:
            yield _with(node, op=_SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = deepcopy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


class _Replace(ast.NodeTransformer):
    def __init__(self, number: int, mutant: ast.AST) -> None:
        self._left = number
        self._mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        self._left -= 1
        return ast.copy_location(self._mutant, node) if self._left == -1 else super().generic_visit(node)


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    node: int
    """Its number, in the order of a walk."""
    change: ast.AST

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {ast.unparse(self.change).splitlines()[0]}"

    def source(self, original: str) -> str:
        """The whole file with this change."""
        return ast.unparse(
            ast.fix_missing_locations(_Replace(self.node, self.change).visit(ast.parse(original)))
        )


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """One for every change there is. How dataclasses are made (frozen, slots) is no behaviour, and stays."""
    tree = ast.parse(source)
    decorators = [
        item for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.decorator_list
    ]
    left_alone = {node for decorator in decorators for node in ast.walk(decorator)}
    for number, node in enumerate(_walk(tree)):
        for change in changed(node) if node not in left_alone else ():
            yield Mutant(file, getattr(node, "lineno", 0), number, change)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """In the order in which a transformer visits."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


class _Notes:
    """A pytest plugin: what tests took, and which libraries they imported. One that hangs ends the process."""

    def __init__(self, patience_s: int) -> None:
        self._patience_s = patience_s
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slowest_s = 0.0
        self._failed: set[str] = set()

    def pytest_runtest_logstart(self) -> None:
        signal.alarm(self._patience_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._slowest_s = max(self._slowest_s, report.duration)
        if report.failed:
            self._failed.add(file)

    def write(self, file: Path) -> None:
        here = str(file.parent)
        libraries = [name for name, module in sys.modules.items() if not _path(module).startswith(here)]
        quickest_first = sorted(self._seconds, key=self._seconds.__getitem__)
        found = {"libraries": libraries, "files": quickest_first, "failed": sorted(self._failed)}
        file.write_text(json.dumps({**found, "slowest_s": self._slowest_s}))


def _path(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


class Tests:
    """Tests of a copy of the tree. Files that fail although nothing is changed in it are left out."""

    def __init__(self, copy: Path, paths: Sequence[str]) -> None:
        self._copy = copy
        self._notes = copy / "notes.json"
        self._patience_s = 3600
        self._run([*paths, "--collect-only"])
        for name in json.loads(self._notes.read_text())["libraries"]:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self._run(paths)
        notes = json.loads(self._notes.read_text())
        self._patience_s = round(10 + 5 * notes["slowest_s"])
        self._files = [file for file in notes["files"] if file not in notes["failed"]]
        for file in notes["failed"]:
            print(f"{file}: fails without a change, and is left out", flush=True)

    def notice(self, mutant: Mutant) -> bool:
        """Whether one of them fails with this change, or hangs."""
        file = self._copy / mutant.file
        original = file.read_text()
        file.write_text(mutant.source(original))
        try:
            return not self._run(["-x", *self._files])
        finally:
            file.write_text(original)

    def _run(self, arguments: Sequence[str]) -> bool:
        """Whether they pass, in a process of their own."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = self._main(arguments)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started
        return status == 0

    def _main(self, arguments: Sequence[str]) -> int:
        """In the new process: pytest's exit status."""
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.chdir(self._copy)
        os.environ["PYTHONPATH"] = sys.path[0] = str(self._copy)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        notes, options = _Notes(self._patience_s), ["-q", "-n", "0", "-p", "no:cacheprovider"]
        options += ["--hypothesis-profile", "mutants", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        status = pytest.main([*options, *arguments], plugins=[notes])
        notes.write(self._notes)
        return status


def _files(paths: Sequence[str]) -> list[str]:
    """Returns the modules; a folder stands for those in it."""
    return [
        str(file.relative_to(ROOT))
        for path in paths
        for file in (sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path])
    ]


def _folder(file: str) -> str:
    """Returns the folder of the tests of a file."""
    return next(str(folder) for folder in Path("tests", file).parents if (ROOT / folder).is_dir())


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=20, help="mutants, of all files together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = [mutant for file in _files(options.files) for mutant in mutants(file, (ROOT / file).read_text())]
    drawn = random.Random(options.seed).sample(found, min(options.most, len(found)))
    by_tests: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in drawn:
        by_tests[_folder(mutant.file)].append(mutant)
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)  # penstock's links lead to what is changed
        for tests_folder in sorted(by_tests, key=lambda name: -name.count("/")):  # the largest last
            tests = Tests(copy, options.tests or [tests_folder])
            survivors = [mutant for mutant in by_tests[tests_folder] if not tests.notice(mutant)]
            num_survivors += len(survivors)
            print(f"{tests_folder}: {len(survivors)} of {len(by_tests[tests_folder])} survive", flush=True)
            for mutant in survivors:
                print(f"  {mutant}", flush=True)
    print(f"{num_survivors} of {len(drawn)} survive")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
