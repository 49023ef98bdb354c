"""New grammars: each tenant has its turn, whatever others compile, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from penstock.engine.text.grammar import CompiledGrammar, Grammar, GrammarKind
from penstock.engine.text.grammar_check import MOST_AT_ONCE
from penstock.engine.text.grammars import TooManyGrammars
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.compiling import Compiling
from penstock.gateway.wire.structured import Form

pytestmark = pytest.mark.anyio


class Compiler:
    """Compiles what is slow when it is told to, and all else at once."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.done: list[tuple[str, str]] = []
        self.begun = threading.Semaphore(0)

    def find(self, tenant: str, grammar: Grammar) -> CompiledGrammar | None:
        return _compiled(grammar) if (tenant, grammar.text) in self.done else None

    def compile(self, tenant: str, grammar: Grammar) -> CompiledGrammar:
        self.begun.release()
        if grammar.text == "slow":
            assert self.go_on.wait(30)
        if grammar.text == "one too many":
            raise TooManyGrammars
        self.done.append((tenant, grammar.text))
        return _compiled(grammar)


def _compiled(grammar: Grammar) -> CompiledGrammar:
    matcher: Any = None
    return CompiledGrammar(grammar, matcher)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.go_on.set()


def form(text: str) -> Form:
    return Form("guided_regex", Grammar(GrammarKind.REGEX, text))


async def slow_ones(
    compiling: Compiling, compiler: Compiler, num: int
) -> list[asyncio.Task[CompiledGrammar]]:
    """Begins a slow compilation for each of so many tenants."""
    tasks = [asyncio.create_task(compiling.compile(f"slow {i}", form("slow"))) for i in range(num)]
    for _ in tasks:
        assert await asyncio.to_thread(compiler.begun.acquire, timeout=30)
    return tasks


def compiling_of(compiler: Compiler) -> Compiling:
    given: Any = compiler
    return Compiling(given)


async def test_a_slow_grammar_holds_up_its_own_tenant_alone(compiler: Compiler) -> None:
    compiling = compiling_of(compiler)
    (slow,) = await slow_ones(compiling, compiler, 1)
    behind = asyncio.create_task(compiling.compile("slow 0", form("quick")))
    await asyncio.sleep(0)
    for tenant in ("a", "b"):
        await compiling.compile(tenant, form("quick"))
    assert compiler.done == [("a", "quick"), ("b", "quick")]
    compiler.go_on.set()
    await asyncio.gather(slow, behind)
    assert compiler.done[2:] == [("slow 0", "slow"), ("slow 0", "quick")]


@pytest.mark.parametrize("num_slow", [1, MOST_AT_ONCE])
async def test_who_waits_for_too_long_is_told_to_come_back(
    compiler: Compiler, num_slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = compiling_of(compiler)
    slow = await slow_ones(compiling, compiler, num_slow)
    tenant = "slow 0" if num_slow == 1 else "another"
    with monkeypatch.context() as hurried:
        hurried.setattr(compiling, "_patience_s", 0.05)
        with pytest.raises(ApiError) as raised:
            await compiling.compile(tenant, form("quick"))
    assert raised.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert raised.value.code == "grammars_busy"
    assert "retry-after" in raised.value.headers()
    compiler.go_on.set()
    await asyncio.gather(*slow)
    await compiling.compile(tenant, form("quick"))
    assert compiler.done[-1] == (tenant, "quick")


async def test_what_there_is_no_room_for_is_to_come_back(compiler: Compiler) -> None:
    with pytest.raises(ApiError) as raised:
        await compiling_of(compiler).compile("a", form("one too many"))
    assert raised.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert raised.value.code == "grammars_busy"
    assert "retry-after" in raised.value.headers()
