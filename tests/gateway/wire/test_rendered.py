"""A conversation's next turn is tokenised from where it is new, and its tokens are those of the whole text."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.rendered import RenderedTexts
from tests.few import examples

TOKENIZER = Tokenizer.load(DEMO_MODEL)
MARKS = sorted(TOKENIZER.token_bytes(i).decode() for i in TOKENIZER.cutting_ids)


def overlapping() -> Tokenizer:
    """The demo model's tokenizer with tokens that begin or end as another one, some of them no special tokens."""
    content = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    like, num = content["added_tokens"][0], TOKENIZER.vocab_size
    others = ((MARKS[0] + "b", True), (MARKS[0] + "c", False), ("x" + MARKS[0], False))
    for number, (text, is_special) in enumerate(others):
        more = {"id": num + number, "content": text, "special": is_special, "normalized": False}
        content["added_tokens"].append({**like, **more})
    return Tokenizer(json.dumps(content))


OVERLAPPING = overlapping()


class CountingTokenizer:
    """A tokenizer, which counts the characters that it encodes."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER) -> None:
        self.num_chars = 0
        self.tokenizer = tokenizer
        self.cutting_ids = tokenizer.cutting_ids
        self.token_bytes = tokenizer.token_bytes

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        self.num_chars += len(text)
        return self.tokenizer.encode(text, parse_special=parse_special, add_special=add_special)


def rendered_by(tokenizer: CountingTokenizer, *, most_bytes: int = 1 << 20) -> RenderedTexts:
    return RenderedTexts(tokenizer, least_chars=0, most_bytes=most_bytes)  # type: ignore[arg-type]


texts = st.lists(
    st.sampled_from([*MARKS, *MARKS, "b", "c", "x", " word", "\n", "Ünï", "<|", "|>", "😀"]), max_size=12
).map("".join)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 40), st.sampled_from("ab")), min_size=1, max_size=6))
def test_tokens_do_not_depend_on_what_was_encoded_before(turns: list[tuple[str, int, str]]) -> None:
    """Texts go on from earlier ones, or from the beginnings of them, of any owner."""
    rendered, text = rendered_by(CountingTokenizer(OVERLAPPING), most_bytes=200), ""
    for more, kept, owner in turns:
        text = text[: len(text) - kept] + more
        assert rendered.encode(text, owner) == OVERLAPPING.encode(text, parse_special=True)


@pytest.mark.parametrize(
    "turns", [("a" + MARKS[0], "b"), ("a" + MARKS[0] + "dx" + MARKS[0], "e"), (MARKS[0] + "b", MARKS[0])]
)
def test_tokens_that_begin_or_end_as_a_special_one_are_found_as_in_the_whole_text(
    turns: tuple[str, ...],
) -> None:
    rendered, text = rendered_by(CountingTokenizer(OVERLAPPING)), ""
    for more in turns:
        text += more
        assert rendered.encode(text, "a") == OVERLAPPING.encode(text, parse_special=True)


def test_a_turn_costs_what_is_new_in_it_whatever_came_before() -> None:
    source = random.Random(0)
    costs = {}
    for num_words in (1_000, 20_000):
        tokenizer = CountingTokenizer()
        rendered = rendered_by(tokenizer, most_bytes=1 << 24)
        text = MARKS[0] + " ".join(source.choices(["fox", "forest", "said"], k=num_words)) + MARKS[-1]
        rendered.encode(text, "a")
        tokenizer.num_chars = 0
        text += "Tell me more." + MARKS[0]
        assert rendered.encode(text, "a") == TOKENIZER.encode(text, parse_special=True)
        costs[num_words] = tokenizer.num_chars
        tokenizer.num_chars = 0
        rendered.encode(text, "b")
        assert tokenizer.num_chars >= len(text), "another owner's beginnings are none of his"
    assert costs[20_000] == costs[1_000] < 100


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    tokenizer = CountingTokenizer()
    rendered = rendered_by(tokenizer, most_bytes=12_000)
    first, second, third = (letter * 1_000 + MARKS[0] for letter in "xyz")
    for text in (first, second, first, third):
        rendered.encode(text, "a")
    tokenizer.num_chars = 0
    rendered.encode(first, "a")
    assert tokenizer.num_chars < 100
    rendered.encode(second, "a")
    assert tokenizer.num_chars > 1_000


@pytest.mark.parametrize("owner", [None, "tenant"])
def test_a_chat_of_many_turns_has_the_tokens_of_one_that_nobody_remembers(owner: str | None) -> None:
    prompts = Prompts(TOKENIZER)
    prompts._rendered = RenderedTexts(TOKENIZER, least_chars=100)
    messages: list[dict[str, str]] = []
    for number in range(6):
        messages.append({"role": "user", "content": f"Tell me story {number}. " * 20})
        found = prompts.chat(messages, owner=owner)
        assert found == Prompts(TOKENIZER).chat(messages)
        assert bool(prompts._rendered._known) == (owner is not None)
        messages.append({"role": "assistant", "content": f" Once upon a time, {number}. " * 30})
