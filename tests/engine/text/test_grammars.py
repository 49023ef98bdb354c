"""Compiling: what is a grammar, what is too much of one, and how long that takes."""

from __future__ import annotations

import json
import pickle
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from pydantic import TypeAdapter

from penstock.engine.planning.masks import start_guide
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.text import grammars as module
from penstock.engine.text.grammar import Grammar, GrammarKind, Guide
from penstock.engine.text.grammar_check import GrammarCheck
from penstock.engine.text.grammars import GrammarError, Grammars, TooManyGrammars, source_of
from penstock.engine.text.tokenizer import Tokenizer
from tests.gateway.harness import EOS, make_tokenizer, tokenizer_json

TOKENIZER = make_tokenizer()
SCHEMA, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, (EOS,))


def guide(grammars: Grammars, grammar: Grammar, text: str = "") -> Guide:
    request = Request(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(grammar=grammars.compile("tenant", grammar)),
        output_token_ids=tuple(TOKENIZER.encode(text)),
    )
    return start_guide(request)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(SCHEMA, "true"), '{"a": [1, null]}'),
        (Grammar(SCHEMA, '{"enum": ["é☃", 1.5]}'), '"é☃"'),
        (Grammar(SCHEMA, '{"type": "string", "maxLength": 2}'), '"\\n☃"'),
        (Grammar(REGEX, "[é-ü]{3}|x"), "éñü"),
        (Grammar(LARK, 'start: "a\\n\\"" | /b+c/'), 'a\n"'),
        (Grammar(LARK, 'root ::= "a" [0-9] "b"?'), "a7b"),
        (Grammar(LARK, 'start: "<" @answer', Grammar(REGEX, "[0-9]{2}")), "<17"),
        (Grammar(LARK, 'start: "<" @answer', Grammar(LARK, 'start: "a" b\nb: "c"')), "<ac"),
        (Grammar(LARK, 'start: "<" @answer', Grammar(LARK, 'root ::= "a" [0-9]')), "<a7"),
        (Grammar(LARK, 'start: "<" @answer', Grammar(SCHEMA, '{"const": [1, 2]}')), "<[1, 2]"),
        (Grammar(LARK, 'start: "<" @answer', Grammar(SCHEMA, "true")), '<{"a": 1}'),
    ],
)
def test_a_text_that_matches_is_followed_to_its_end(grammars: Grammars, grammar: Grammar, text: str) -> None:
    grammars.compile("tenant", grammar)
    found = guide(grammars, grammar, text)
    assert (found.error, found.is_complete) == ("", True)
    for end in range(len(text)):
        assert not guide(grammars, grammar, text[:end]).is_complete
    wrong = guide(grammars, grammar, f"{text[:-1]}\x7f")
    assert wrong.error.startswith("the grammar could not be followed")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar(REGEX, "("), "unclosed"),
        (Grammar(REGEX, "(?=a)b"), "look-ahead"),
        (Grammar(LARK, "start: nothing"), "nothing"),
        (Grammar(LARK, 'root := "a"'), ""),
        (Grammar(LARK, 'a ::= "b"'), "root"),
        (Grammar(SCHEMA, "false"), "Unsatisfiable"),
        (Grammar(SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum"),
        (Grammar(SCHEMA, '{"not": {"type": "string"}}'), "not"),
        (Grammar(SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(SCHEMA, '{"$ref": "http://127.0.0.1/x.json"}'), "fetch"),
        (Grammar(SCHEMA, '{"$ref": "#"}'), ""),
        (Grammar(SCHEMA, '{"items":' * 1000 + "{}" + "}" * 1000), "recursion"),
        (Grammar(SCHEMA, "{"), ""),
        (
            Grammar(SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(1500)}, "type": "object"})),
            "items",
        ),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused(grammars: Grammars, grammar: Grammar, why: str) -> None:
    with pytest.raises(GrammarError) as raised:
        grammars.compile("tenant", grammar)
    message = str(raised.value)
    assert message
    assert why in message
    assert "\n" not in message


def test_a_special_token_may_have_any_number_that_the_vocabulary_has() -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.add_special_tokens([f"<|{i}|>" for i in range(300)])
    tokenizer = Tokenizer(inner.to_str(), {}, None)
    grammars, number = Grammars(tokenizer, (EOS,)), tokenizer.vocab_size - 1
    matcher = grammars.compile("tenant", Grammar(LARK, f'start: /(?s:.*)/ <[{number}]> "a"')).matcher
    assert matcher.consume_tokens([*TOKENIZER.encode("b"), number, *TOKENIZER.encode("a")])
    assert matcher.is_accepting()
    with pytest.raises(GrammarError):
        grammars.compile("tenant", Grammar(LARK, f"start: <[{number + 1}]>"))


PARTS = " & ".join(f"/.*a.{{{i}}}.*/" for i in range(5, 30))
ENDLESS = source_of(Grammar(LARK, f"start: X\nX: {PARTS}"))


def free_of(check: GrammarCheck) -> list[subprocess.Popen[bytes]]:
    return [process._popen for process in check._free]


def test_one_slow_grammar_holds_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check, started, popen = GrammarCheck(patience_s=30.0), set[subprocess.Popen[bytes]](), subprocess.Popen

    def noted(*args: Any, **fields: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **fields)
        started.add(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", noted)
    assert check.refusal(source_of(Grammar(REGEX, "a"))) == ""
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(check.refusal, ENDLESS)
        while free_of(check):
            assert not slow.done()
        quick = [check.refusal(source_of(Grammar(REGEX, text))) for text in ("a", "b", "(")]
        assert not slow.done()
        assert [bool(refusal) for refusal in quick] == [False, False, True]
        for process in started - set(free_of(check)):
            process.kill()
        assert slow.result() == "it is too complex"


def test_a_process_with_nothing_to_do_ends_and_another_takes_its_place() -> None:
    check = GrammarCheck(idle_s=0.05)
    assert check.refusal(source_of(Grammar(REGEX, "a"))) == ""
    (process,) = free_of(check)
    deadline = time.monotonic() + 30
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.returncode == 0  # nobody asked for it: it is reaped by itself
    assert check.refusal(source_of(Grammar(REGEX, "b"))) == ""
    assert process not in free_of(check)


def test_what_takes_too_long_to_compile_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is checked as if nothing had been."""
    check = GrammarCheck(patience_s=30.0)
    assert check.refusal(source_of(Grammar(REGEX, "a"))) == ""
    with monkeypatch.context() as hurried:
        hurried.setattr(check, "_patience_s", 0.3)
        assert check.refusal(ENDLESS) == "it is too complex"
    assert check.refusal(source_of(Grammar(REGEX, "b"))) == ""


def noting(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are compiled from now on."""
    texts, compile_ = list[str](), grammars._compile

    def noted(grammar: Grammar) -> object:
        texts.append(grammar.text)
        return compile_(grammar)

    monkeypatch.setattr(grammars, "_compile", noted)
    return texts


def test_a_tenant_s_grammars_are_compiled_once_and_the_oldest_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(TOKENIZER, (EOS,))
    compiled = noting(grammars, monkeypatch)
    monkeypatch.setattr(module, "_MOST_COMPILED", 2)
    for tenant, text in [("t", "a"), ("t", "a"), ("u", "a"), ("t", "a"), ("t", "b"), ("t", "a"), ("u", "a")]:
        grammars.compile(tenant, Grammar(REGEX, text))
    assert compiled == ["a", "a", "b", "a"]


def request_of(grammar: Grammar) -> Request:
    return Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(grammar=grammar))


def test_a_waiting_request_keeps_its_grammar_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZER, (EOS,))
    compiled = noting(grammars, monkeypatch)
    monkeypatch.setattr(module, "_MOST_COMPILED", 2)
    texts = [f"a{i}" for i in range(10)]
    waiting = [request_of(grammars.compile("t", Grammar(REGEX, text))) for text in texts]
    assert compiled == texts
    for request in [*waiting, *(replace(request, n=2) for request in waiting)]:
        assert not start_guide(request).error
    assert grammars.find("t", Grammar(REGEX, "a0")) is waiting[0].sampling.grammar
    assert compiled == texts
    del waiting, request
    assert len(grammars._compiled) == 2, "what nobody waits for is forgotten but for the latest"


def test_requests_have_a_bounded_number_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZER, (EOS,))
    monkeypatch.setattr(module, "_MOST_IN_USE", 3)
    waiting = [request_of(grammars.compile("t", Grammar(REGEX, f"a{i}"))) for i in range(2)]
    for text in ("b", "c", "d"):
        grammars.compile("t", Grammar(REGEX, text))  # those that nobody waits for make room
        assert len(grammars._compiled) <= 3
    waiting.append(request_of(grammars.compile("t", Grammar(REGEX, "e"))))
    with pytest.raises(TooManyGrammars):
        grammars.compile("t", Grammar(REGEX, "f"))
    assert grammars.compile("t", Grammar(REGEX, "a0")) is waiting[0].sampling.grammar
    del waiting[0]
    grammars.compile("t", Grammar(REGEX, "f"))


def test_the_step_thread_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(TOKENIZER, (EOS,))
    compiled = noting(grammars, monkeypatch)
    assert start_guide(request_of(Grammar(REGEX, "a"))).error == "the grammar was not compiled"
    assert not compiled


def test_a_compiled_grammar_is_sent_elsewhere_as_its_texts(grammars: Grammars) -> None:
    plain = Grammar(LARK, 'start: "<" @answer', Grammar(REGEX, "[0-9]{2}"))
    request = request_of(grammars.compile("t", plain))
    pickled = pickle.loads(pickle.dumps(request))
    as_json = TypeAdapter(Request).dump_json(request, warnings="error")
    for copy in (pickled, TypeAdapter(Request).validate_json(as_json)):
        assert copy == request_of(plain)
        assert type(copy.sampling.grammar) is Grammar


def test_a_tokenizer_may_have_holes_in_its_ids() -> None:
    content = json.loads(tokenizer_json())
    last = TOKENIZER.vocab_size + 10
    content["model"]["vocab"]["<|far|>"] = last
    content["added_tokens"].append({**content["added_tokens"][0], "id": last, "content": "<|far|>"})
    grammars = Grammars(tokenizer := Tokenizer(json.dumps(content)), (last,))
    assert tokenizer.vocab_size == last + 1
    grammars.prepare()
    found = grammars.compile("t", Grammar(REGEX, "a+")).matcher.deep_copy()
    assert found.consume_tokens(TOKENIZER.encode("aa"))
    bits = found.compute_bitmask()
    allowed = {i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1}
    assert last in allowed
    assert not allowed & set(range(TOKENIZER.vocab_size, last))
    hole = last - 1
    assert (tokenizer.decode([hole]), tokenizer.piece(hole), tokenizer.token_bytes(hole)) == ("", "", b"")


@pytest.mark.parametrize("eos_token_ids", [(), (TOKENIZER.vocab_size,)])
def test_a_model_without_an_end_token_is_served_and_follows_no_grammar(
    eos_token_ids: tuple[int, ...],
) -> None:
    grammars = Grammars(TOKENIZER, eos_token_ids)
    grammars.prepare()
    with pytest.raises(GrammarError, match="names no token that ends an answer"):
        grammars.compile("tenant", Grammar(REGEX, "a"))
    params = SamplingParams(allowed_token_ids=(5,))
    assert start_guide(Request(request_id="r", prompt_token_ids=(1,), sampling=params)).error == ""
