"""Grammars, compiled by llguidance for one tokenizer."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from penstock.engine.text.exact_numbers import TooComplex, exact_rules
from penstock.engine.text.grammar import CompiledGrammar, Grammar, GrammarKind, one_line
from penstock.engine.text.grammar_check import GrammarCheck, limits
from penstock.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions

_MOST_COMPILED = 256
"""Compiled grammars that are kept, whether a request has them or not."""
_MOST_IN_USE = 512
"""Compiled grammars, those of requests included. One takes 0.15 to 1.5 MB, the largest 5 MB."""
_CHECK = GrammarCheck()
_JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON texts are laid out as Python's json.dumps has it: free space is what small models never stop with."""


class GrammarError(ValueError):
    """A grammar cannot be followed; the message is for the client."""


class TooManyGrammars(RuntimeError):
    """Requests that wait or run have as many different grammars as may be compiled at once."""


_Key = tuple[str, Grammar]
"""Tenant and plain grammar: nobody learns from the time that compiling takes what others ask for."""


class Grammars:
    """Compiles grammars and keeps them. Its methods may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        # llguidance refuses the whole vocabulary where a configuration names an end that the tokenizer does not have.
        self.eos_token_ids = tuple(i for i in eos_token_ids if i < tokenizer.vocab_size)
        """The tokens that end a sequence."""
        self._compiled = WeakValueDictionary[_Key, CompiledGrammar]()
        """All compiled grammars: those of requests, and the latest."""
        self._latest: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Hands the vocabulary to llguidance, which takes up to seconds and holds the interpreter: before all work."""
        _ = self._vocabulary

    def compile(self, tenant: str, grammar: Grammar) -> CompiledGrammar:
        """The grammar, compiled, for this tenant's requests to have.

        Raises:
            GrammarError: it is not a grammar, or too large a one; or the model has no token to end an answer with.
            TooManyGrammars: it may be compiled when requests have ended.
        """
        if (found := self.find(tenant, grammar)) is not None:
            return found
        if not self.eos_token_ids:
            raise GrammarError("the model's configuration names no token that ends an answer")
        key = tenant, grammar.plain
        with self._lock:
            while self._latest and len(self._compiled) >= _MOST_IN_USE:
                self._latest.popitem(last=False)
            if len(self._compiled) >= _MOST_IN_USE:
                raise TooManyGrammars(f"{_MOST_IN_USE} grammars are in use")
        if refusal := _CHECK.refusal(source_of(grammar)):
            raise GrammarError(one_line(refusal))
        matcher = self._compile(grammar)
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        with self._lock:
            found = self._compiled[key] = CompiledGrammar(grammar.plain, matcher)
            self._note_use(key, found)
        return found

    def find(self, tenant: str, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar, if it is compiled."""
        key = tenant, grammar.plain
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._note_use(key, found)
        return found

    @property
    def vocab_size(self) -> int:
        """The tokens that a mask has a bit for."""
        return self._vocabulary.vocab_size

    def _note_use(self, key: _Key, grammar: CompiledGrammar) -> None:
        """Makes a grammar the latest that was used, with the lock held."""
        self._latest[key] = grammar
        self._latest.move_to_end(key)
        if len(self._latest) > _MOST_COMPILED:
            self._latest.popitem(last=False)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, source_of(grammar), log_level=0, limits=limits())
        probe = matcher.deep_copy()
        if not probe.is_error():
            probe.compute_bitmask()  # says whether there is any answer
        return probe if probe.is_error() else matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        vocabulary = cast("TokenizerWrapper", _Vocabulary(self._tokenizer, self.eos_token_ids))
        return LLTokenizer(vocabulary, eos_token=list(self.eos_token_ids) or None)


class _Vocabulary:
    """A tokenizer as llguidance asks for one (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.special_token_ids = sorted(tokenizer.special_ids.union(eos_token_ids))
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def source_of(grammar: Grammar) -> str:
    """A grammar as llguidance reads it; a text that is none makes a matcher that says so."""
    from llguidance import LLMatcher

    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.answer is not None:
        return json.dumps({"grammars": [{"lark_grammar": grammar.text}, _named("answer", grammar.answer)]})
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(_as_lark(grammar.text))
    if rules := _exact_rules(grammar.text):
        return LLMatcher.grammar_from_lark(rules)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, _JSON_STYLE)
    except ValueError:  # it is `true`, or no JSON
        return f'{{"grammars": [{{"json_schema": {grammar.text}}}]}}'


def _exact_rules(text: str) -> str:
    """Returns the grammar of a schema with integers beyond 2^53; empty if it has none."""
    try:
        return "\n".join(exact_rules(json.loads(text), "start", _JSON_STYLE))
    except TooComplex as error:
        raise GrammarError(str(error)) from None
    except (ValueError, RecursionError):  # llguidance says what is wrong with it
        return ""


def _named(name: str, grammar: Grammar) -> dict[str, object]:
    """A grammar for others to refer to."""
    source = source_of(grammar)
    if grammar.kind is GrammarKind.LARK or (
        grammar.kind is GrammarKind.JSON_SCHEMA and _exact_rules(grammar.text)
    ):
        return {"name": name, "lark_grammar": source}
    return {**json.loads(source)["grammars"][0], "name": name}


def _as_lark(text: str) -> str:
    """Text in GBNF, llama.cpp's notation, as Lark.

    Raises:
        GrammarError: it is GBNF, and wrong.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return str(any_to_lark(text))
    except GbnfToLarkError:
        return text
    except Exception as error:  # it raises what has no type of its own for a missing rule
        raise GrammarError(one_line(str(error))) from None
