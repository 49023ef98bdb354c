"""What grammars and markers were made of is remembered, within a bound."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

from penstock.engine.text.grammar import Grammar
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.memo import Memo
from penstock.gateway.wire.reading import Formats
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from penstock.gateway.wire.tools.grammars import MAX_TOOLS_BYTES
from penstock.gateway.wire.tools.use import ToolUse, tool_use
from tests.gateway.harness import make_tokenizer

PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}, "long": {"type": "boolean"}}}


def use_of(name: str, **parameters: Any) -> ToolUse:
    function = {"name": name, "parameters": {**PARAMETERS, **parameters}}
    return tool_use([{"type": "function", "function": function}], "required")


class Counted:
    """The texts that a tokenizer encodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer = make_tokenizer()
        self.texts: list[str] = []
        encode = self.tokenizer.encode

        def counting(text: str, **fields: bool) -> list[int]:
            self.texts.append(text)
            return encode(text, **fields)

        monkeypatch.setattr(self.tokenizer, "encode", counting)


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_the_same_tools_again_encode_nothing(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    formats = Formats(counted.tokenizer, format, "think")

    def prepared(use: ToolUse, tenant: str = "a") -> Grammar | None:
        reading = formats.reading([], use)
        assert formats.shown(reading) is formats.shown(reading)
        formats.budget([], reading, 100, lambda _: ("", ""))
        return formats.grammar([], reading, use, None, tenant)

    first, num_first = prepared(use_of("clock")), len(counted.texts)
    assert num_first > 0
    assert prepared(use_of("clock")) == first
    assert prepared(use_of("clock"), "b") == first
    assert len(counted.texts) == num_first
    other = prepared(use_of("clock", additionalProperties=False))
    assert other is not None
    assert prepared(use_of("watch")) != first
    assert {text for text in counted.texts[num_first:] if "watch" not in text} == set()


def test_a_grammar_has_the_flags_of_its_request() -> None:
    formats = Formats(make_tokenizer(), "hermes", "think")
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}]
    uses = [tool_use(tools, "required"), tool_use(tools), tool_use(tools, "required", one_call=True)]
    texts = {
        grammar.text for use in uses if (grammar := formats.grammar([], formats.reading([], use), use, None))
    }
    assert len(texts) == len(uses)


def test_tools_that_are_too_large_are_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    formats = Formats(counted.tokenizer, "qwen3_coder", "none")
    for num_bytes, is_refused in ((MAX_TOOLS_BYTES // 2, False), (MAX_TOOLS_BYTES, True)):
        use = use_of("clock", description="a" * num_bytes)
        reading = formats.reading([], use)
        if not is_refused:
            assert formats.grammar([], reading, use, None) is not None
            continue
        counted.texts.clear()
        with pytest.raises(ApiError) as error:
            formats.grammar([], reading, use, None)
        assert (error.value.status, error.value.param, error.value.code) == (400, "tools", "tools_too_large")
        assert counted.texts == []


def test_a_memo_forgets_what_was_not_used_for_longest() -> None:
    memo, made = Memo[str, str](2000), list[str]()

    def get(key: str) -> str:
        return memo.get(key, lambda: made.append(key) or key * 600)  # type: ignore[func-returns-value]

    for key in "abacabb":
        assert get(key) == key * 600
    assert made == ["a", "b", "c", "b"]
    assert memo.get("x", lambda: "x" * 9000) == "x" * 9000


def test_a_memo_is_full_at_its_bound_and_not_before() -> None:
    """The result that nobody asked for longest goes first."""
    memo, made = Memo[int, str](max_bytes=2 * (sys.getsizeof("....") + 256)), list[int]()

    def make(key: int) -> str:
        made.append(key)
        return "...."

    for key in (1, 2, 1, 2, 3, 2, 1):
        memo.get(key, partial(make, key))
    assert made == [1, 2, 3, 1]
