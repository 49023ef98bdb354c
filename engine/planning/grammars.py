"""Masks: which tokens may come next, by grammars that llguidance compiled and by what requests rule out.

For each row that is sampled there is a mask of the tokens that are allowed after those before, drafts included. With a
grammar, the end of the sequence is among them exactly where the grammar accepts what there is.

`min_tokens`, and with a grammar `ignore_eos`, hold the end back as long as something else may follow; they cannot hold
up an answer that is complete.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from penstock.engine.cores import num_cores
from penstock.engine.planning.bans import Bans, bits_of, without
from penstock.engine.planning.exact_numbers import TooComplex, exact_rules
from penstock.engine.planning.grammar import CompiledGrammar, Grammar, GrammarKind, Guide, one_line
from penstock.engine.planning.grammar_check import GrammarCheck, limits
from penstock.engine.planning.request import Request, SamplingParams, Sequence
from penstock.engine.planning.step import Chunk, Masks, Plan
from penstock.engine.planning.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance._lib import JsonCompileOptions

_MOST_COMPILED = 256
"""Compiled grammars that are kept, whether a request has them or not."""
_MOST_IN_USE = 512
"""Compiled grammars, those of requests included. One takes 0.15 to 1.5 MB, the largest 5 MB."""
_NUM_THREADS = max(1, num_cores() * 4 // 5)
"""Threads that llguidance may use for masks."""
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
    """Compiles grammars for one tokenizer and computes masks. Its methods may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        # llguidance refuses the whole vocabulary where a configuration names an end that the tokenizer does not have.
        self._eos_token_ids = tuple(i for i in eos_token_ids if i < tokenizer.vocab_size)
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
        if not self._eos_token_ids:
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

    def start(self, request: Request) -> Guide:
        """The guide of a request's sequence, after the output tokens that are known already.

        Nothing is compiled here, on the step thread: a grammar that is not compiled yet is an error of its sequence.
        """
        params, matcher, bans, error = request.sampling, None, None, ""
        if isinstance(params.grammar, CompiledGrammar):
            matcher = params.grammar.matcher.deep_copy()
        elif params.grammar is not None:
            error = "the grammar was not compiled"
        if params.allowed_token_ids or params.bad_words:
            bans = Bans(params.allowed_token_ids, params.bad_words)
        guide = Guide(matcher, bans, error)
        for token_id in request.output_token_ids:
            guide.advance(token_id)
        return guide

    def masks(self, plan: Plan) -> Masks | None:
        """The tokens that the rows of a step may bring; None if they may bring any.

        All tokens before them have to be known.
        """
        first: list[int] = []
        guided: list[tuple[Guide, int, Chunk]] = []
        num_rows = 0
        for chunk in plan.chunks:
            guide = self._guide_of(chunk.sequence) if chunk.samples else None
            if guide is None or guide.error:
                first.append(-1)
                continue
            first.append(num_rows)
            guided.append((guide, num_rows, chunk))
            num_rows += 1 + len(chunk.drafts)
        if not guided:
            return None
        masks = Masks(bytearray(4 * self._num_words * num_rows), self._num_words, first)
        self._fill(masks, guided, num_rows)
        for guide, row, chunk in guided:
            self._rule_out(masks, guide, row, chunk)
        return masks

    def _guide_of(self, sequence: Sequence) -> Guide | None:
        if sequence.guide is None and sequence.request.sampling.is_guided:
            sequence.guide = self.start(sequence.request)
        return sequence.guide

    def _fill(self, masks: Masks, guided: list[tuple[Guide, int, Chunk]], num_rows: int) -> None:
        """Has llguidance compute what grammars allow, without the interpreter's lock.

        Its own threads do it all at once. Where there would be one of them, it would take the work away from the caches
        of this one; then only rows with drafts are for it, which nothing else computes.
        """
        place, size = (
            ctypes.addressof((ctypes.c_char * len(masks.bits)).from_buffer(masks.bits)),
            4 * masks.num_words,
        )
        matched = [
            (guide.matcher, row, chunk.drafts) for guide, row, chunk in guided if guide.matcher is not None
        ]
        plain = [(matcher, row) for matcher, row, drafts in matched if not drafts]
        drafted = [(matcher, row, list(drafts)) for matcher, row, drafts in matched if drafts]
        if _NUM_THREADS == 1:
            for matcher, row in plain:
                matcher.unsafe_compute_mask_ptr(place + row * size, size)
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, place, size, num_rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, place, size, num_rows)
        for guide, _, _ in guided:
            guide.look()

    def _rule_out(self, masks: Masks, guide: Guide, row: int, chunk: Chunk) -> None:
        """Takes what the request rules out, and what would end its sequence too early, out of the rows of a chunk."""
        sequence, bans = chunk.sequence, guide.bans
        params, number = sequence.request.sampling, sequence.num_output_tokens
        if bans is None and number >= params.min_tokens and not params.ignore_eos:
            return
        size, before = 4 * masks.num_words, [*guide.before, *chunk.drafts]
        for num_drafts in range(1 + len(chunk.drafts)):
            place = slice((row + num_drafts) * size, (row + num_drafts + 1) * size)
            tokens = self._all if guide.matcher is None else int.from_bytes(masks.bits[place], "little")
            if bans is not None:
                tokens = bans.kept(tokens, before[: len(guide.before) + num_drafts])
            tokens = without(tokens, bits_of(self._ending(params, number + num_drafts)))
            masks.bits[place] = tokens.to_bytes(size, "little")
            if not tokens and not num_drafts:
                guide.error = guide.error or "no token is allowed by both the grammar and 'allowed_token_ids'"

    def _ending(self, params: SamplingParams, number: int) -> Iterable[int]:
        """The tokens that may not come after `number` output tokens, as long as another token may."""
        eos = self._eos_token_ids if params.grammar is not None or not params.ignore_eos else ()
        if number < params.min_tokens:
            return params.stop_token_ids.union(eos)
        return eos if params.ignore_eos else ()

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

        vocabulary = cast("TokenizerWrapper", _Vocabulary(self._tokenizer, self._eos_token_ids))
        return LLTokenizer(vocabulary, eos_token=list(self._eos_token_ids) or None)

    @cached_property
    def _all(self) -> int:
        """The set of all tokens."""
        return (1 << self._vocabulary.vocab_size) - 1

    @cached_property
    def _num_words(self) -> int:
        return -(-self._vocabulary.vocab_size // 32)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(_NUM_THREADS)


class ForcedTokens:
    """Proposes the tokens that a grammar forces, such as the names of members; see `planning.drafting.Proposer`."""

    name = "grammar"
    is_behind = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [
            [] if sequence.guide is None else sequence.guide.forced()[:length]
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    def forget(self, sequence: Sequence) -> None:
        """Does nothing: it holds nothing of a sequence."""


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
