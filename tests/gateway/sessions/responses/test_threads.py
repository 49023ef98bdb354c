"""A follow-up's prompt: it says what the template wants, in the tokens that the model really generated."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.text.detokenizer import make_detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.errors import ApiError
from penstock.gateway.sessions.responses.threads import Thread, extend, splice
from penstock.gateway.wire.conversation import TemplateMessage as Message
from penstock.gateway.wire.prompts import Prompts
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer
from tests.gateway import harness

THREADS = TypeAdapter(Thread)

SPECIAL = ["<|bos|>", "<|end|>", "<|start|>", "<|eot|>"]
_EACH = "{% for m in messages %}"
_ANSWER = "{% if add_generation_prompt %}"

# With these the context of an answer is the beginning of every prompt that follows.
VERBATIM = {
    "chatml": _EACH + "<|start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n" + "{% endif %}",
    "headers": "<|bos|>" + _EACH + "<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    f"{_ANSWER}<|start|>assistant<|end|>\n\n" + "{% endif %}",
    "tight": _EACH + "<|start|>{{ m.role }}<|end|>{{ m.content }}<|eot|>{% endfor %}"
    f"{_ANSWER}<|start|>assistant<|end|>" + "{% endif %}",
    "no special tokens": _EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    f"{_ANSWER}assistant: " + "{% endif %}",
}
# These rewrite what is past.
REWRITING = {
    "trims": "<|bos|>" + _EACH + "<|start|>{{ m.role }}\n{{ m.content | trim }}<|eot|>{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n" + "{% endif %}",
    "forgets reasoning": _EACH
    + "<|start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|eot|>\n{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n" + "{% endif %}",
    "thinks first": _EACH + "<|start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n<think>\n" + "{% endif %}",
    "spaces": _EACH + "{% if m.role == 'assistant' %} {{ m.content }} <|eot|>"
    "{% else %}<|bos|>[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "counts": "{{ messages | length }}"
    + _EACH
    + "<|start|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n" + "{% endif %}",
    "drops": "{% for m in messages[-2:] %}<|start|>{{ m.role }}\n{{ m.content }}<|eot|>{% endfor %}"
    f"{_ANSWER}<|start|>assistant\n" + "{% endif %}",
}
TEMPLATES = VERBATIM | REWRITING


@cache
def tokenizer_of(kind: str) -> str:
    """As JSON, with special tokens for all templates."""
    import tokenizers

    made = {
        "bytes": lambda: tokenizers.Tokenizer.from_str(harness.tokenizer_json()),
        "byte-level": lambda: tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str()),
        "metaspace": lambda: tokenizers.Tokenizer.from_str(metaspace_tokenizer().to_str()),
    }[kind]()
    made.add_special_tokens(SPECIAL)
    return str(made.to_str())


KINDS = ["bytes", "byte-level", "metaspace"]


@cache
def prompts_of(kind: str, template: str) -> Prompts:
    return Prompts(Tokenizer(tokenizer_of(kind), {"bos_token": "<|bos|>"}, TEMPLATES[template]))


@cache
def demo() -> Prompts:
    return Prompts(Tokenizer.load(DEMO_MODEL))


def reading(tokenizer: Tokenizer, token_ids: list[int]) -> list[int | str]:
    """Splits tokens into special ones and the texts between."""
    found: list[int | str] = []
    run: list[int] = []
    for token_id in [*token_ids, -1]:
        if token_id in tokenizer.special_ids or token_id == -1:
            found += [tokenizer.decode(run, skip_special=False), token_id]
            run = []
        else:
            run.append(token_id)
    return found[:-1]


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Decodes generated tokens as the engine does."""
    detokenizer = make_detokenizer(tokenizer)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def turn(prompts: Prompts, thread: Thread, said: str, output: list[int], text: str | None = None) -> Thread:
    """A question, and the answer that the model gives with these tokens."""
    tokenizer: Any = prompts.tokenizer
    prompt = extend(prompts, thread, [user(said)])
    answer = assistant(text_of(tokenizer, output) if text is None else text)
    return Thread((*thread.messages, user(said), answer), (*prompt, *output))


def spelt(prompts: Prompts, text: str) -> list[int]:
    """Tokens of a text as nothing would tokenise it: a character at a time."""
    return [token_id for character in text for token_id in prompts.tokenizer.encode(character)]


def special(prompts: Prompts, token: str) -> list[int]:
    return prompts.tokenizer.encode(token, parse_special=True)


# What is kept


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
@pytest.mark.parametrize("template", VERBATIM)
@pytest.mark.parametrize("end", ["<|eot|>", ""])
def test_the_tokens_of_every_answer_are_kept(kind: str, template: str, end: str) -> None:
    prompts, thread = prompts_of(kind, template), Thread()
    for number in range(3):
        answer = spelt(prompts, f"the river runs {number}") + (special(prompts, end) if end else [])
        thread = turn(prompts, thread, f"and {number}?", answer)
    prompt = extend(prompts, thread, [user("more")])
    kept = len(thread.token_ids) - (template == "no special tokens" and bool(end))
    assert prompt[:kept] == list(thread.token_ids[:kept])
    assert prompts.tokenizer.decode(prompt, skip_special=False) == prompts.tokenizer.decode(
        prompts.chat([*thread.messages, user("more")]), skip_special=False
    )


def test_what_would_be_lost_without_the_tokens() -> None:
    prompts = prompts_of("byte-level", "chatml")
    thread = turn(prompts, Thread(), "Hi", spelt(prompts, "the water wheel turns"))
    from_text = prompts.chat([*thread.messages, user("more")])
    assert from_text[: len(thread.token_ids)] != list(thread.token_ids)


def test_the_demo_model() -> None:
    prompts, thread = demo(), Thread()
    for said in ("Hello there.", "What is a <|end|> token?", "日本"):
        thread = turn(
            prompts, thread, said, spelt(prompts, "It was <|end|>\nnaïve 日.") + special(prompts, "<|end|>")
        )
    prompt = extend(prompts, thread, [user("more")], instructions=None)
    assert prompt[: len(thread.token_ids)] == list(thread.token_ids)
    wanted = prompts.chat([*thread.messages, user("more")])
    assert reading(prompts.tokenizer, prompt) == reading(prompts.tokenizer, wanted)  # type: ignore[arg-type]
    assert prompt != wanted


def test_what_a_sentencepiece_model_says_without_a_leading_space() -> None:
    prompts = prompts_of("metaspace", "tight")
    tokenizer: Any = prompts.tokenizer
    answer = [tokenizer.id_of(character) for character in "river"]
    thread = turn(prompts, Thread(), "Hi", answer + special(prompts, "<|eot|>"))
    assert thread.messages[-1]["content"] == "river"
    assert extend(prompts, thread, [user("more")])[: len(thread.token_ids)] == list(thread.token_ids)


def test_instructions_that_stay_keep_everything_and_others_nothing() -> None:
    prompts = prompts_of("bytes", "headers")
    prompt = extend(prompts, Thread(), [user("Hi")], instructions="Be brief.")
    output = special(prompts, "a") + special(prompts, "<|eot|>")
    thread = Thread((user("Hi"), assistant("a")), (*prompt, *output))
    same = extend(prompts, thread, [user("more")], instructions="Be brief.")
    assert same[: len(thread.token_ids)] == list(thread.token_ids)
    other = [{"role": "system", "content": "Be long."}, *thread.messages, user("more")]
    assert extend(prompts, thread, [user("more")], instructions="Be long.") == prompts.chat(other)


def test_a_deleted_message_costs_only_what_came_after_it() -> None:
    prompts, thread = prompts_of("byte-level", "chatml"), Thread()
    for said in ("one", "two", "three"):
        thread = turn(prompts, thread, said, spelt(prompts, "the river") + special(prompts, "<|eot|>"))
    first = turn(prompts, Thread(), "one", spelt(prompts, "the river") + special(prompts, "<|eot|>"))
    without = Thread(thread.messages[:2] + thread.messages[4:], thread.token_ids)
    assert extend(prompts, without, [user("more")])[: len(first.token_ids)] == list(first.token_ids)


def test_a_message_that_was_added_after_the_answer() -> None:
    prompts = prompts_of("byte-level", "chatml")
    thread = turn(prompts, Thread(), "one", spelt(prompts, "the answer") + special(prompts, "<|eot|>"))
    longer = Thread((*thread.messages, user("two")), thread.token_ids)
    prompt = extend(prompts, longer, [])
    assert prompt == extend(prompts, thread, [user("two")])
    assert prompt != prompts.chat(list(longer.messages)), "the answer's own tokens are kept"


def test_an_answer_that_ended_with_another_token_than_the_templates() -> None:
    prompts = prompts_of("byte-level", "chatml")
    said = spelt(prompts, "the river")
    thread = turn(prompts, Thread(), "one", said + special(prompts, "<|end|>"))
    prompt = extend(prompts, thread, [user("more")])
    assert prompt[: len(thread.token_ids)] == [*thread.token_ids[:-1], *special(prompts, "<|eot|>")]


# What is not


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("end", ["<|eot|>", "<|end|>", ""])
def test_whatever_the_tokenizer_and_the_template(kind: str, template: str, end: str) -> None:
    prompts, thread = prompts_of(kind, template), Thread()
    tokenizer: Any = prompts.tokenizer
    for _ in range(3):
        river = [tokenizer.id_of(character) for character in "river"]
        thread = turn(prompts, thread, "Hi", river + (special(prompts, end) if end else []))
    wanted = prompts.chat([*thread.messages, user("more")])
    assert reading(tokenizer, extend(prompts, thread, [user("more")])) == reading(tokenizer, wanted)


def test_known_tokens_without_a_text_are_not_kept() -> None:
    prompts = prompts_of("bytes", "no special tokens")
    wanted = prompts.chat([user("x<|end|>")])
    assert splice(prompts.tokenizer, [], wanted) == wanted


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_that_a_stop_string_cut(template: str) -> None:
    prompts = prompts_of("bytes", template)
    thread = turn(prompts, Thread(), "one", spelt(prompts, "the river STOP"), "the river ")
    wanted = prompts.chat([*thread.messages, user("more")])
    assert extend(prompts, thread, [user("more")]) == wanted


def test_reasoning_that_the_template_forgets() -> None:
    prompts = prompts_of("bytes", "forgets reasoning")
    answer = spelt(prompts, "<think>hm</think>yes") + special(prompts, "<|eot|>")
    thread = turn(prompts, turn(prompts, Thread(), "one", answer), "two", answer)
    prompt = extend(prompts, thread, [user("more")])
    assert prompt == prompts.chat([*thread.messages, user("more")])
    assert "hm" not in prompts.tokenizer.decode(prompt)


def test_a_special_token_within_an_answer_is_never_sent_back() -> None:
    prompts = prompts_of("bytes", "chatml")
    answer = spelt(prompts, "a") + special(prompts, "<|start|>") + spelt(prompts, "b")
    thread = turn(prompts, Thread(), "one", answer)
    assert thread.messages[-1]["content"] == "ab"
    assert extend(prompts, thread, [user("more")]) == prompts.chat([*thread.messages, user("more")])


@pytest.mark.parametrize("known", [(10**6,), (2**32 - 1, 5), (0,), tuple(range(300))])
def test_tokens_of_another_model_change_nothing(known: tuple[int, ...]) -> None:
    prompts = prompts_of("bytes", "chatml")
    assert extend(prompts, Thread((user("x"),), known), []) == prompts.chat([user("x")])


def test_a_model_without_a_template_is_a_400() -> None:
    with pytest.raises(ApiError) as error:
        extend(Prompts(harness.make_tokenizer(None)), Thread(), [user("x")])
    assert error.value.code == "no_chat_template"


# Whatever was said


TEXTS = st.lists(
    st.sampled_from([*SPECIAL, "<|", "|>", "the river", " ", "\n", "</think>", "é日😀", "\ufdd0", "▁", "x"]),
    max_size=6,
).map("".join)


@given(st.data(), st.sampled_from(KINDS), st.sampled_from(list(TEMPLATES)))
def test_every_prompt_says_what_the_template_wants(data: st.DataObject, kind: str, template: str) -> None:
    prompts = prompts_of(kind, template)
    tokenizer: Any = prompts.tokenizer
    ordinary = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in tokenizer.special_ids)
    pieces = st.one_of(
        ordinary.map(lambda i: [i]), TEXTS.map(lambda text: spelt(prompts, text)), TEXTS.map(tokenizer.encode)
    )
    ends = st.sampled_from(["<|eot|>", "<|end|>", ""]).map(lambda end: special(prompts, end) if end else [])
    thread = Thread()
    for said in data.draw(st.lists(TEXTS, max_size=3)):
        output = [*chain(*data.draw(st.lists(pieces, max_size=5))), *data.draw(ends)]
        thread = turn(prompts, thread, said, output)
        if data.draw(st.booleans()):
            thread = THREADS.validate_json(THREADS.dump_json(thread))
    new = [user(text) for text in data.draw(st.lists(TEXTS, min_size=1, max_size=2))]
    prompt = extend(prompts, thread, new)
    wanted = prompts.chat([*thread.messages, *new])
    assert reading(tokenizer, prompt) == reading(tokenizer, wanted)
    # U+FDD0 is replaced wherever it comes in.
    is_plain = not any("\ufdd0" in message["content"] for message in thread.messages)
    if is_plain and template in VERBATIM and template != "no special tokens" and kind != "metaspace":
        is_whole = not thread.token_ids or thread.token_ids[-1] not in special(prompts, "<|end|>")
        kept = len(thread.token_ids) - (not is_whole)
        assert prompt[:kept] == list(thread.token_ids[:kept])


@given(st.lists(st.integers(0, 280), max_size=30), st.lists(st.integers(0, 280), max_size=30))
def test_no_known_tokens_can_change_what_is_said(known: list[int], wanted: list[int]) -> None:
    tokenizer: Any = prompts_of("bytes", "chatml").tokenizer
    inside = [token_id for token_id in wanted if token_id < tokenizer.vocab_size]
    usable = [token_id for token_id in known if token_id < tokenizer.vocab_size]
    spliced = splice(tokenizer, usable, inside)
    assert reading(tokenizer, spliced) == reading(tokenizer, inside)
    assert splice(tokenizer, [], inside) == inside
    assert splice(tokenizer, inside, inside) == inside


# As JSON


@given(st.lists(st.integers(0, 2**32 - 1)).map(tuple))
def test_packing(token_ids: tuple[int, ...]) -> None:
    assert THREADS.validate_json(THREADS.dump_json(Thread((), token_ids))).token_ids == token_ids


def test_packed_tokens_are_little_endian() -> None:
    assert b'"AQAAAAIBAAA="' in THREADS.dump_json(Thread((), (1, 258)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"messages": [], "token_ids": None},
        {"messages": [], "token_ids": "AQAA"},
        {"messages": [], "token_ids": "!"},
        {"messages": [], "token_ids": "日"},
        {"messages": {}, "token_ids": ""},
        {"messages": [1], "token_ids": ""},
        {"messages": [{"role": "user", "content": 1}], "token_ids": ""},
    ],
)
def test_what_is_no_thread_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        THREADS.validate_python(value)
