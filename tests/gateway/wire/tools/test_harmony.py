"""gpt-oss's messages: what they come to in whatever pieces they come, and the grammars that hold replies to them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher

from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.engine.text.grammars import Grammars, source_of
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.parsing import Answer, ReplyParser, answer_of
from penstock.gateway.wire.reading import Formats, Reading
from penstock.gateway.wire.reasoning import REASONING_FORMATS
from penstock.gateway.wire.tools.formats import HARMONY
from penstock.gateway.wire.tools.grammars import Beside, calls_grammar
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.harness import make_tokenizer, tokenizer_json
from tests.gateway.wire.tools.test_formats import in_pieces
from tests.gateway.wire.tools.test_grammars import SCHEMAS, TOKENIZER, accepts, anything

NEXT = "<|start|>assistant"
ANALYSIS, COMMENTARY = "<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": true}'
ADD = [("add", {"a": 1, "b": True})]
HM = f"{ANALYSIS}Hm. 1 < 2<|end|>{NEXT}"
FIELDS: dict[str, Any] = {"tools": HARMONY, "reasoning": HARMONY, "schemas": SCHEMAS}

# Text, reasoning, what is said, calls.
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (f"{HM}{FINAL}Yes.", "Hm. 1 < 2", "Yes.", []),
    (f"{FINAL}Yes. <|end|>", "", "Yes.", []),
    (f"{HM}{CALL}", "Hm. 1 < 2", "", ADD),
    (f"{HM}{CALL}<|call|>{NEXT}{FINAL}Yes.", "Hm. 1 < 2", "Yes.", ADD),
    (f"{HM}{COMMENTARY}I add.\n<|end|>{NEXT}{CALL}<|call|>", "Hm. 1 < 2", "I add.", ADD),
    (
        f"{HM}{COMMENTARY}I add.<|end|>{NEXT}{ANALYSIS}Two.<|end|>{NEXT}{FINAL}So.",
        "Hm. 1 < 2\nTwo.",
        "I add.\nSo.",
        [],
    ),
    # The recipient may stand with the role, and the type without its marker, as the maker's template has them.
    (' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": true}<|call|>', "", "", ADD),
    (
        f'{HM} to=functions.add<|channel|>commentary<|message|> {{"a": 1, "b": true}}<|end|>',
        "Hm. 1 < 2",
        "",
        ADD,
    ),
    ("<|channel|>commentary to=functions.clock <|constrain|>json<|message|>", "", "", [("clock", {})]),
    (
        f"<|channel|>commentary to=functions.clock<|message|><|call|>{NEXT}{FINAL}So.",
        "",
        "So.",
        [("clock", {})],
    ),
    # Tools of the model's own, which are called in its reasoning.
    (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}',
        "",
        "",
        [("browser.search", {"query": "x"})],
    ),
    (f"{HM}<|channel|>analysis to=python code<|message|>print(1)", "Hm. 1 < 2\nprint(1)", "", []),
    # What the prompt has begun, and what a reply was cut off in.
    (" Yes.\n", "", " Yes.\n", []),
    ("", "", "", []),
    (" ", "", " ", []),
    (f"{ANALYSIS}Hm", "Hm", "", []),
    (f"{HM}<|channel|>fin", "Hm. 1 < 2", "", []),
    (f"{FINAL}Yes.<|end|>Well.", "", "Yes.\nWell.", []),
]


def parser(**fields: Any) -> ReplyParser:
    return Reading(**{**FIELDS, **fields}).parser("a")


@pytest.mark.parametrize(("text", "reasoning", "said", "calls"), CASES)
def test_messages_come_to_what_their_channels_say(
    text: str, reasoning: str, said: str, calls: list[tuple[str, Any]]
) -> None:
    answer = answer_of(parser(), text)
    assert (answer.reasoning, answer.text) == (reasoning, said)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert in_pieces(parser(), list(text)) == answer
    rng = random.Random(text)
    for _ in range(5):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert in_pieces(parser(), pieces) == answer


@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_nothing_that_was_told_is_taken_back(text: str) -> None:
    whole = answer_of(parser(), text)
    for end in range(len(text)):
        shown = Answer()
        shown.add(parser().feed(text[:end]))
        assert whole.text.startswith(shown.text)
        assert whole.reasoning.startswith(shown.reasoning)
        for call, wanted in zip(shown.calls, whole.calls, strict=False):
            assert (call.id, call.name) == (wanted.id, wanted.name)
            assert wanted.arguments.startswith(call.arguments)


def test_however_random_messages_are_cut_they_say_the_same() -> None:
    words = [
        NEXT,
        ANALYSIS,
        COMMENTARY,
        FINAL,
        CALL,
        HM,
        "<|end|>",
        "<|call|>",
        "<|message|>",
        "<|channel|>",
        "<|start|>",
    ]
    words += [
        " to=functions.clock",
        "to=python",
        "commentary",
        "{",
        "}",
        '{"a": 1}',
        '"',
        " ",
        "\n",
        "x <|",
        "<",
    ]
    rng = random.Random(7)
    for _ in range(400):
        fields: dict[str, Any] = {
            "tools": rng.choice([HARMONY, None]),
            "reasoning": rng.choice([HARMONY, None]),
        }
        fields["is_open"] = rng.random() < 0.2
        texts = rng.choices(words, k=rng.randrange(1, 12))
        assert in_pieces(parser(**fields), list("".join(texts))) == answer_of(
            parser(**fields), "".join(texts)
        ), texts


def test_a_request_without_tools_has_no_calls() -> None:
    answer = answer_of(parser(tools=None), f"{HM}{CALL}<|call|>")
    assert (answer.text, answer.calls) == ("", [])
    assert answer.reasoning == 'Hm. 1 < 2\n{"a": 1, "b": true}<|call|>'


def test_reasoning_is_text_where_the_operator_says_so() -> None:
    answer = answer_of(parser(reasoning=None), f"{HM}{FINAL}Yes.")
    assert (answer.reasoning, answer.text) == ("", "Hm. 1 < 2\nYes.")


def test_a_prompt_may_have_begun_reasoning() -> None:
    answer = answer_of(parser(is_open=True), f"Hm.<|end|>{NEXT}{FINAL}Yes.")
    assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (f"{HM}{FINAL}Yes.", f"{ANALYSIS}Hm. 1 < 2<|end|>"),
        (f"{FINAL}Yes.", ""),
        (
            f"{HM}{COMMENTARY}I add.<|end|>{NEXT}{ANALYSIS}Two.<|end|>{NEXT}{CALL}",
            f"{HM[: -len(NEXT)]}{NEXT}{ANALYSIS}Two.<|end|>",
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 4])
def test_the_tokens_of_reasoning_are_counted_wherever_they_come(text: str, counted: str, step: int) -> None:
    tokenizer = make_tokenizer()
    thoughts = Formats(tokenizer).thoughts(Reading(**FIELDS))
    assert thoughts is not None
    token_ids = tokenizer.encode(text)  # a token a byte
    steps = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    assert sum(thoughts.count(0, some) for some in steps) == len(counted)


# Grammars

THINKING = REASONING_FORMATS[HARMONY]
TEXT = f"{FINAL}Hm, {{[<"
WRONG = CALL.replace("true", "1")


def matcher(answer: Grammar | None = None, **fields: Any) -> LLMatcher:
    fields = {"one_call": False, "thinking": THINKING, **fields}
    text = calls_grammar(HARMONY, SCHEMAS, json.dumps, **fields)
    return LLMatcher(TOKENIZER, source_of(Grammar(GrammarKind.LARK, text, answer)))


@pytest.mark.parametrize(
    ("beside", "allowed", "refused"),
    [
        (Beside.NOTHING, [CALL], [TEXT, WRONG, CALL + CALL, f"Well. {CALL}"]),
        (Beside.TEXT, [CALL, TEXT, FINAL], [WRONG, "Yes."]),
        (Beside.ANSWER, [CALL, f"{FINAL}yes"], [WRONG, "yes", f"{FINAL}Yes."]),
    ],
)
@pytest.mark.parametrize("before", ["", HM, f"{HM}{COMMENTARY}I add.<|end|>{NEXT}", HM + HM])
def test_a_reply_is_reasoning_and_then_a_call_or_an_answer(
    beside: Beside, allowed: list[str], refused: list[str], before: str
) -> None:
    answer = Grammar(GrammarKind.REGEX, "yes|no") if beside is Beside.ANSWER else None
    found = matcher(answer, beside=beside)
    for text in allowed:
        assert accepts(found.deep_copy(), before + text), text
    for text in refused:
        assert not accepts(found.deep_copy(), before + text), text
    begun = matcher(answer, beside=beside, is_open=True)
    assert accepts(begun.deep_copy(), f"Hm.<|end|>{NEXT}{before}{allowed[0]}")
    assert not accepts(begun, allowed[0])


def test_whatever_a_forced_call_allows_is_one() -> None:
    rng = random.Random(5)
    for _ in range(10):
        text = anything(matcher(thinking=None), rng)
        (call,) = answer_of(parser(), text).calls
        assert set(SCHEMAS[call.name].get("required", ())) <= json.loads(call.arguments).keys()


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
YES = Grammar(GrammarKind.REGEX, "yes|no")
SIGNS = (
    "{# <|channel|>analysis<|message|><|end|><|channel|>final<|message|><|return|><|channel|>commentary #}"
)


def special_tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.add_special_tokens(SPECIAL)
    return Tokenizer(inner.to_str(), {}, SIGNS)


@pytest.mark.parametrize(
    ("prompt", "tools", "mode", "answer", "allowed"),
    [
        (NEXT, False, "auto", YES, f"{HM}{FINAL}yes"),
        (f"{NEXT}{ANALYSIS}", False, "auto", YES, f"Hm.<|end|>{NEXT}{FINAL}yes"),
        (f"{NEXT}{FINAL}It is ", False, "auto", YES, "yes"),
        (NEXT, True, "required", None, HM + CALL),
        (NEXT, True, "auto", YES, f"{HM}{FINAL}no"),
    ],
)
def test_the_grammar_goes_on_where_the_prompt_ends(
    prompt: str, tools: bool, mode: Any, answer: Grammar | None, allowed: str
) -> None:
    tokenizer = special_tokenizer()
    formats, use = Formats(tokenizer), tool_use(TOOLS if tools else [], mode)
    ids = tokenizer.encode(prompt, parse_special=True)
    reading = formats.reading(ids, use)
    grammar = formats.grammar(ids, reading, use, answer)
    assert grammar is not None
    grammars = Grammars(tokenizer, tuple(tokenizer.encode("<|call|><|return|>", parse_special=True)))
    found = grammars.compile("a", grammar).matcher
    said = tokenizer.encode(allowed, parse_special=True)
    for tokens, is_allowed in ((said, True), ([*said, 100], False)):
        one = found.deep_copy()
        assert (one.consume_tokens(tokens) and one.is_accepting()) is is_allowed
    assert {*tokenizer.encode("".join(SPECIAL[:5]), parse_special=True)} <= formats.shown(reading)


def test_an_answer_that_is_scored_begins_in_its_channel() -> None:
    tokenizer = special_tokenizer()
    formats = Formats(tokenizer)
    for prompt, closing in ((NEXT, FINAL), (NEXT + ANALYSIS, f"<|end|>{NEXT}{FINAL}")):
        ids = formats.closing(tokenizer.encode(prompt, parse_special=True))
        assert ids == tokenizer.encode(closing, parse_special=True)
