"""`make mutants FILES="gateway/access/quotas.py"`: which small changes of a file would no test notice?

Each mutant is one change of one expression, in a copy of the tree; the tests of the file's folder run on it, and those
given by TESTS. A mutant that survives them is printed: a test is missing, or the change changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300
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


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, what it says now, and the whole source with one change, for every change there is."""
    tree = ast.parse(source)
    nodes: list[ast.AST] = []

    def note(node: ast.AST) -> None:
        nodes.append(node)
        for child in ast.iter_child_nodes(node):
            note(child)

    note(tree)
    for number, node in enumerate(nodes):
        for mutant in changed(node):
            other = ast.fix_missing_locations(_Replace(number, mutant).visit(deepcopy(tree)))
            yield getattr(node, "lineno", 0), ast.unparse(mutant).splitlines()[0], ast.unparse(other)


def is_killed(copy: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=20, help="of each file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "*.egg-info", "__pycache__")
        )
        for file in options.files:
            source, tests = (copy / file).read_text(), options.tests or [str(Path("tests", file).parent)]
            if is_killed(copy, tests):
                parser.error(f"{file}: its tests fail without a change")
            found = list(mutants(source))
            for line, text, mutant in random.Random(options.seed).sample(
                found, min(options.most, len(found))
            ):
                (copy / file).write_text(mutant)
                if not is_killed(copy, tests):
                    num_survivors += 1
                    print(f"{file}:{line}: survives: {text}", flush=True)
            (copy / file).write_text(source)
    print(f"{num_survivors} survive")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
