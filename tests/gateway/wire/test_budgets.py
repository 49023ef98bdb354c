"""Budgets for reasoning: how they are asked for, and the tokens that end it in each format."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from penstock.engine.text.grammar import Grammar, GrammarKind, Guide
from penstock.engine.text.grammars import Grammars
from penstock.engine.text.thinking import Thinking, ThinkingBudget
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.wire.anthropic.bodies import MessagesBody, as_chat
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.reading import Formats
from penstock.gateway.wire.reasoning import REASONING_FORMATS
from penstock.gateway.wire.schemas import ChatBody
from penstock.gateway.wire.strict import read
from penstock.gateway.wire.tools.formats import HARMONY, TOOL_FORMATS
from penstock.gateway.wire.tools.use import ToolUse, tool_use
from tests.gateway.harness import chat_body, tokenizer_json
from tests.gateway.wire.test_published_templates import WORLD, prompts_of

NEXT = "<|start|>assistant"
SPACES = ("\n", "\n\n")
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "boolean"}')
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "additionalProperties": False}},
}
TOOLS_OF = {"gemma4": "gemma4", HARMONY: HARMONY, "cohere2": "cohere2", "seed_oss": "seed_oss"}


def formats_of(format: str) -> tuple[Tokenizer, Formats]:
    """A vocabulary in which the format's marks are special tokens, as far as they look like such."""
    inner, tools = tokenizers.Tokenizer.from_str(tokenizer_json()), TOOLS_OF.get(format, "hermes")
    marks = [*REASONING_FORMATS[format], NEXT, *TOOL_FORMATS[tools].markers]
    special = {part for mark in marks for part in mark.replace(">", "> ").replace("<", " <").split()}
    inner.add_special_tokens(sorted(part for part in special if part[0] == "<" and part[-1] == ">"))
    tokenizer = Tokenizer(inner.to_str(), {}, None)
    return tokenizer, Formats(tokenizer, tools, format)


def budget_of(
    format: str, prompt: str, number: int, use: ToolUse | None = None
) -> tuple[Tokenizer, ThinkingBudget | None]:
    tokenizer, formats = formats_of(format)
    ids = tokenizer.encode(prompt, parse_special=True)
    reading = formats.reading(ids, use or tool_use([]))
    return tokenizer, formats.budget(ids, reading, number, lambda _: SPACES)


@pytest.mark.parametrize(
    ("format", "is_open"),
    # As bytes, the marker of words is longer than the end of a prompt that is looked at.
    [(format, False) for format in REASONING_FORMATS]
    + [(format, True) for format in REASONING_FORMATS if format != "granite_words"],
)
def test_the_marker_that_ends_reasoning_is_forced_within_the_budget(format: str, is_open: bool) -> None:
    """Whoever counts as usage does finds no more reasoning than the budget allows."""
    opening, closing = REASONING_FORMATS[format]
    before = NEXT if format == HARMONY else ""
    tokenizer, budget = budget_of(format, before + (opening if is_open else ""), 60)
    assert budget is not None
    formats = formats_of(format)[1]
    begun = [] if is_open else tokenizer.encode(opening, parse_special=True)
    thinking = Thinking(budget, tokenizer.token_bytes)
    followed = thinking.follow([*begun, *tokenizer.encode("x" * 100)])
    text = tokenizer.decode(followed, skip_special=False)
    assert text.count(closing) == 1
    assert text.partition(closing)[2] == (
        f"{NEXT}<|channel|>final<|message|>" if format == HARMONY else "\n\n"
    )
    reading = formats.reading(
        tokenizer.encode(before + (opening if is_open else ""), parse_special=True), tool_use([])
    )
    thoughts = formats.thoughts(reading)
    assert thoughts is not None
    assert thoughts.count(0, [*followed, *tokenizer.encode("Yes.")]) == 60


def test_who_does_not_reason_is_left_alone() -> None:
    for format, text in (
        ("think", "Yes, <think>x</think>."),
        (HARMONY, "<|channel|>final<|message|>Yes, I do."),
    ):
        tokenizer, budget = budget_of(format, NEXT if format == HARMONY else "", 0)
        assert budget is not None
        said = tokenizer.encode(text + "x" * 50, parse_special=True)
        assert Thinking(budget, tokenizer.token_bytes).follow(said) == said


def test_reasoning_that_the_prompt_has_ended_needs_no_budget() -> None:
    assert budget_of("think", "<think></think>", 9)[1] is None
    assert budget_of(HARMONY, f"{NEXT}<|channel|>final<|message|>", 9)[1] is None


def test_harmony_may_still_call_and_reasons_no_second_time() -> None:
    tokenizer, budget = budget_of(HARMONY, NEXT, 12, tool_use([ADD]))
    assert budget is not None
    thinking, opening = Thinking(budget, tokenizer.token_bytes), REASONING_FORMATS[HARMONY].opening
    thoughts = tokenizer.encode(opening + "x" * 20, parse_special=True)
    ended = tokenizer.decode(thinking.follow(thoughts), skip_special=False)
    assert ended.endswith(f"<|end|>{NEXT}<|channel|>commentary")
    thinking.follow(tokenizer.encode("<|message|>I add.<|end|>" + NEXT, parse_special=True))
    again = tokenizer.decode(thinking.follow(thoughts), skip_special=False)
    assert again == f"{opening}<|end|>{NEXT}<|channel|>commentary"


@pytest.mark.parametrize("format", REASONING_FORMATS)
@pytest.mark.parametrize("tools", [False, True])
def test_a_grammar_takes_the_forced_tokens(format: str, tools: bool) -> None:
    tokenizer, formats = formats_of(format)
    opening, _ = REASONING_FORMATS[format]
    prompt = tokenizer.encode(NEXT if format == HARMONY else "", parse_special=True)
    use = tool_use([ADD], "required") if tools else tool_use([])
    reading = formats.reading(prompt, use)
    budget = formats.budget(prompt, reading, 99, lambda _: SPACES)
    grammar = formats.grammar(prompt, reading, use, None if tools else JSON)
    assert budget is not None
    assert grammar is not None
    guide = Guide(Grammars(tokenizer, (1,)).compile("a", grammar).matcher.deep_copy())
    thought = tokenizer.encode(opening + "x" * 99, parse_special=True)
    for token_id in Thinking(budget, tokenizer.token_bytes).follow(thought):
        guide.advance(token_id)
        assert not guide.error
    assert not guide.is_complete


@pytest.mark.skipif(not WORLD.is_dir(), reason="no published templates lie beside the repository")
@pytest.mark.parametrize(
    ("name", "closing", "spaces"),
    [
        ("Qwen-Qwen3-0.6B", "</think>", ("\n", "\n\n")),
        ("Qwen3.5-4B", "</think>", ("\n", "\n\n")),
        ("GLM-4.6", "</think>", ("", "\n")),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "</think>", ("\n", "\n\n")),
        ("ByteDance-Seed-OSS", "</seed:think>", ("", "\n")),
    ],
)
def test_the_spaces_around_the_marker_are_the_templates_own(
    name: str, closing: str, spaces: tuple[str, str]
) -> None:
    assert prompts_of(name).around_closing(closing) == spaces


def asked(**fields: Any) -> Reasoned:
    return read(ChatBody, {"model": "m", **chat_body(**fields)}, Limits())


@pytest.mark.parametrize(
    ("fields", "variables", "context", "number"),
    [
        ({}, (), 100_000, None),
        ({"thinking_token_budget": 7}, (), 100_000, 7),
        ({"thinking_budget_tokens": 7}, (), 100_000, 7),
        ({"thinking_token_budget": 0}, (), 100_000, 0),
        ({"thinking_token_budget": 7, "reasoning_effort": "high"}, (), 100_000, 7),
        ({"thinking_token_budget": -1, "reasoning_effort": "low"}, (), 100_000, None),
        ({"reasoning_effort": "none"}, (), 100_000, 0),
        ({"reasoning_effort": "minimal"}, (), 100_000, 512),
        ({"reasoning_effort": "low"}, (), 100_000, 1_024),
        ({"reasoning_effort": "medium"}, (), 100_000, 8_192),
        ({"reasoning_effort": "high"}, (), 100_000, 24_576),
        ({"reasoning_effort": "high"}, (), 1_024, 512),
        ({"reasoning_effort": "low"}, (), 1_024, 128),
        ({"reasoning_effort": "xhigh"}, (), 100_000, None),
        ({"reasoning_effort": "low"}, ("reasoning_effort",), 100_000, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 7}, ("reasoning_effort",), 100_000, 7),
    ],
)
def test_what_is_asked_for_as_a_number(
    fields: dict[str, Any], variables: tuple[str, ...], context: int, number: int | None
) -> None:
    assert asked(**fields).budget(variables, context) == number


def test_a_budget_has_one_name() -> None:
    with pytest.raises(ApiError) as refused:
        asked(thinking_token_budget=7, thinking_budget_tokens=7).budget((), 100)
    assert refused.value.param == "thinking_budget_tokens"


@pytest.mark.parametrize(("kind", "number"), [("enabled", 1_024), ("adaptive", 1_024), ("disabled", None)])
def test_anthropics_budget(kind: str, number: int | None) -> None:
    thinking = {"type": kind, "budget_tokens": 1_024}
    body = read(MessagesBody, {"model": "m", "max_tokens": 9, **chat_body(thinking=thinking)}, Limits())
    assert as_chat(body, Limits()).num_thinking == number
