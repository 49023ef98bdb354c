"""Reasoning is told from the answer, and a model's formats are known by its chat template."""

from __future__ import annotations

import pytest

from penstock.app.settings import choices
from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.parsing import Answer, answer_of
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.reading import Formats, Reading
from penstock.gateway.wire.reasoning import REASONING_FORMATS
from penstock.gateway.wire.tools.formats import TOOL_FORMATS
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.harness import make_tokenizer

CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'

# Format, whether the prompt opened it, text, reasoning, answer.
CASES = [
    ("think", False, "<think>\nHm. 1 < 2\n</think>\n\nYes.", "Hm. 1 < 2", "Yes."),
    ("think", False, "\n<think></think>Yes.\n", "", "Yes.\n"),
    ("think", False, "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
    ("think", False, " Yes.", "", " Yes."),
    ("think", False, "<thi", "", "<thi"),
    ("think", False, "", "", ""),
    ("think", False, "<think>Hm", "Hm", ""),
    ("think", True, "Hm.\n</think>\nYes.", "Hm.", "Yes."),
    ("think", True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("think", True, "Hm. </thin", "Hm. </thin", ""),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("seed_oss", False, "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    (
        "think_answer",
        False,
        "<think>\nHm.\n</think>\n<answer>\nYes. <answer> </a\n</answer>",
        "Hm.",
        "Yes. <answer> </a",
    ),
    ("think_answer", False, "<answer>Yes. </ans", "", "Yes. </ans"),
    ("think_answer", False, " Yes.</answer>", "", " Yes.</answer>"),
    ("think_response", True, "Hm.</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
    ("think_response", False, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("cohere2", False, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
    ("cohere2", False, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.", "Hm.", "Yes."),
    ("cohere2_text", True, "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes."),
    (
        "granite_words",
        False,
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        "Hm.",
        "Yes.",
    ),
]


@pytest.mark.parametrize(("format", "is_open", "text", "reasoning", "said"), CASES)
def test_reasoning_stands_before_the_answer(
    format: str, is_open: bool, text: str, reasoning: str, said: str
) -> None:
    reading = Reading(reasoning=format, is_open=is_open)
    expected = Answer(said, reasoning)
    assert answer_of(reading.parser("a"), text) == expected
    parser, answer = reading.parser("a"), Answer()
    for character in text:
        answer.add(parser.feed(character))
    answer.add(parser.finish())
    assert answer == expected


@pytest.mark.parametrize(("format", "is_open", "text"), [case[:3] for case in CASES])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_the_tokens_of_reasoning_are_counted_with_its_markers(
    format: str, is_open: bool, text: str, step: int
) -> None:
    opening, closing = REASONING_FORMATS[format]
    before, marker, _ = text.partition(closing)
    reasons = is_open or text.lstrip().startswith(opening)
    tokenizer = make_tokenizer()
    thoughts = Formats(tokenizer).thoughts(Reading(reasoning=format, is_open=is_open))
    assert thoughts is not None
    token_ids = tokenizer.encode(text)  # a token a byte
    steps = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    for choice in range(2):
        counted = sum(thoughts.count(choice, some) for some in steps)
        assert counted == (len(before + marker) if reasons else 0)


def test_a_call_can_follow_reasoning() -> None:
    reading = Reading(reasoning="think", tools="hermes", is_open=True)
    answer = answer_of(reading.parser("a"), f"A <tool_call>?\n</think>\n\n{CALL}")
    assert (answer.reasoning, answer.text) == ("A <tool_call>?", "")
    assert [call.name for call in answer.calls] == ["clock"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"Hm. {CALL}", ["clock"]),
        (f"As {CALL} So:\n{CALL}\n{CALL}\n", ["clock", "clock"]),
        (f"Hm. {CALL} Or not.", []),
        (f"Hm. {CALL}</think>", []),
        (f"Hm. {CALL[:-1]}", []),
        ("Hm. </tool_call>", []),
        (f"Hm. {CALL.replace('clock', 'none')}", []),
        (f"Hm. <tool_call> {CALL}", ["clock"]),
    ],
)
def test_a_reply_may_end_with_calls_within_its_reasoning(text: str, names: list[str]) -> None:
    """An example of a call is none, but for the last thing that is said."""
    for is_open in (True, False):
        parser = Reading(reasoning="think", tools="hermes", schemas={"clock": {}}, is_open=is_open).parser(
            "a"
        )
        answer = Answer()
        for character in text if is_open else f"<think>{text}":
            answer.add(parser.feed(character))
        answer.add(parser.finish())
        assert [call.name for call in answer.calls] == names
        assert answer.reasoning.rstrip() == text.removesuffix("</think>").rstrip()
        assert len({call.id for call in answer.calls}) == len(names)


def test_calls_that_nothing_opens_are_none_within_reasoning() -> None:
    text = "[clock()]<|python_end|>"
    reading = Reading(reasoning="think", tools="llama_pythonic", schemas={"clock": {}}, is_open=True)
    answer = answer_of(reading.parser("a"), text)
    assert (answer.reasoning, answer.calls) == (text, [])


def test_a_call_can_stand_within_what_is_written_around_an_answer() -> None:
    call = f"<tool_calls>[{CALL[11:-12]}]</tool_calls>"
    text = f"<think>Hm.</think>\n<answer>\nSo. {call}\n</answer>"
    parser, answer = Reading(reasoning="think_answer", tools="hunyuan").parser("a"), Answer()
    for character in text:
        answer.add(parser.feed(character))
    answer.add(parser.finish())
    assert (answer.reasoning, answer.text, [call.name for call in answer.calls]) == ("Hm.", "So.", ["clock"])


def test_what_the_client_does_not_want_to_see_is_left_out() -> None:
    reading = Reading(reasoning="think", tools="hermes", one_call=True, shows_reasoning=False)
    answer = answer_of(reading.parser("a"), f"<think>Hm.</think>So: {CALL}{CALL}")
    assert (answer.reasoning, answer.text, len(answer.calls)) == ("", "So:", 1)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}{{ x.split('</think>') }}", "hermes", "think"),
        ("<tool_call><function=name><parameter=key>", "qwen3_coder", None),
        ("<|python_tag|><tool_call><function=name>", "functionary", None),
        ("[TOOL_CALLS][THINK][/THINK]", "mistral", "mistral"),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("{{ 'List of tools: [' }}{{ x.split('</think>') }}", "lfm2", "think"),
        ("<|START_THINKING|><|END_THINKING|><|START_TEXT|><|END_TEXT|>", None, "cohere2_text"),
        ("Write 'Here is my thought process:', then 'Here is my response:'.", None, "granite_words"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("[func_name1(params)]", "llama_pythonic", None),
        ("{{ messages }}", None, None),
    ],
)
def test_the_template_tells_the_formats(template: str, tools: str | None, reasoning: str | None) -> None:
    formats = Formats(make_tokenizer(template))
    assert (formats.tools, formats.reasoning) == (tools, reasoning)
    told = Formats(make_tokenizer(template), "mistral", "none")
    assert (told.tools, told.reasoning) == ("mistral", None)


def test_a_prompt_that_ends_within_reasoning_opens_it() -> None:
    tokenizer = make_tokenizer("<think></think>")
    formats = Formats(tokenizer)
    for prompt, is_open in (
        ("Hi<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("Hi", False),
        ("", False),
    ):
        assert formats.is_open(tokenizer.encode(prompt)) is is_open


@pytest.mark.parametrize(
    ("ends", "is_on"),
    [
        # As Qwen 3.5's, its smallest models', and Nemotron 3's.
        (
            "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
            "{% else %}<think>\n{% endif %}",
            True,
        ),
        (
            "{% if enable_thinking is defined and enable_thinking is true %}<think>\n"
            "{% else %}<think>\n\n</think>\n\n{% endif %}",
            False,
        ),
        (
            "{% set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
            "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}",
            True,
        ),
    ],
)
def test_a_switch_begins_reasoning_or_ends_it(ends: str, is_on: bool) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}" + ends)
    prompts, formats = Prompts(tokenizer), Formats(tokenizer)
    assert "enable_thinking" in prompts.variables
    answer = Grammar(GrammarKind.LARK, "start: /a/")
    for switches, is_open in (
        ({}, is_on),
        (thinking_switches(True), True),
        (thinking_switches(False), False),
    ):
        prompt = prompts.chat([{"role": "user", "content": "Hi"}], variables=switches)
        reading = formats.reading(prompt, tool_use([]))
        assert reading.is_open is is_open
        # An answer has to match at once where reasoning is over.
        assert (formats.grammar(prompt, reading, tool_use([]), answer) == answer) is not is_open


def test_an_operator_can_name_every_format() -> None:
    assert set(choices("tool_parser")) == {"auto", "none", *TOOL_FORMATS}
    assert set(choices("reasoning_parser")) == {"auto", "none", *REASONING_FORMATS}
