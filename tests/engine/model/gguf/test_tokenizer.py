"""Tokenizers from metadata: they give the ids of the tokenizer.json that the file was made from.

The tokenizers of `PRE` are put together as Hugging Face's own are, of the pre-tokenizers that these are published with.
SentencePiece's is compared with a plain version of its algorithm.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.text.tokenizer import Tokenizer, template_of
from tests.engine.checkpoints import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    PAD,
    ROLES,
    SPECIAL_TOKENS,
    metaspace_tokenizer,
    training_text,
    write_tokenizer,
)
from tests.engine.gguf_files import tokenizer_metadata, write_file
from tests.few import examples

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS = (
    LLAMA3.replace("{1,3}", "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
)
SEED = LLAMA3.replace("{1,3}", "").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split(*patterns: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), {}),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        {},
    ),
    "llama-bpe": (split(LLAMA3), {"ignore_merges": True}),
    "qwen2": (split(LLAMA3.replace("{1,3}", "")), {"normalizer": normalizers.NFC()}),
    "tekken": (split(TEKKEN), {"ignore_merges": True}),
    "glm4": (split(LLAMA3), {"ignore_merges": True}),
    "dbrx": (split(LLAMA3), {}),
    "qwen35": (split(MARKS), {}),
    "minicpm5": (split(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), {"ignore_merges": True}),
    "gpt-4o": (split(O200K), {}),
    "seed-coder": (split(SEED), {}),
    "hunyuan-dense": (split(*DEEPSEEK3), {}),
}

WORDS = [
    "the river", "water's", "WE'LL", "I'd", "'S", "12345", "٣٤", "½", "x1", " ", "  ", "\n", "\r\n", "\t", " \n ", "!",
    "...", "--\n", "/", "naïve", "cafe\u0301", "水車", "발전", "😀", "👩‍👩‍👧", "ǅ", "HTTPServer", "\u00a0", "a", "_",
    "$", "$a", "水1ｱ", "ab\n!", "नमस्ते", "é12", BOS, EOS, *ROLES, "<|", "|>", "\x00",
]  # fmt: skip
TEXTS = st.text() | st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def trained(pre: str) -> tokenizers.Tokenizer:
    splitter, options = PRE[pre]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=options.get("ignore_merges", False)))
    if "normalizer" in options:
        made.normalizer = options["normalizer"]
    made.pre_tokenizer, made.decoder = splitter, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*training_text(), *WORDS * 4], trainer)
    made.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    return made


def make_file(made: tokenizers.Tokenizer, folder: Path, pre: str | None = "gpt-2", **entries: object) -> Path:
    """A file without tensors. Entries replace those of tokenizer.ggml; None leaves one out."""
    write_tokenizer(folder, made)
    (folder / "config.json").write_text(json.dumps({"vocab_size": made.get_vocab_size()}))
    own = {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    write_file(folder / "model.gguf", {**tokenizer_metadata(folder, pre), **own}, {}, lambda _: "F32")
    return folder / "model.gguf"


def read(made: tokenizers.Tokenizer, pre: str | None = "gpt-2", **entries: object) -> Tokenizer:
    with TemporaryDirectory() as name:
        return read_tokenizer(make_file(made, Path(name), pre, **entries))


@cache
def pair(pre: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a file, and that of the tokenizer.json it was made from."""
    made = trained(pre)
    return read(made, pre), Tokenizer(made.to_str(), {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD})


# Bytes


@pytest.mark.parametrize("pre", PRE)
@settings(max_examples=examples(150))
@given(text=TEXTS)
@example("The river's 12345 \n\n  x1 WE'LL ǅ")
def test_ids_are_those_of_the_tokenizer_it_came_from(pre: str, text: str) -> None:
    found, expected = pair(pre)
    for parse_special in (False, True):
        ids = found.encode(text, parse_special=parse_special, add_special=True)
        assert ids == expected.encode(text, parse_special=parse_special, add_special=True)
    ids = found.encode(text)
    assert found.decode(ids) == expected.decode(ids)
    if pre != "qwen2":  # which composes characters
        assert found.decode(ids) == text
    assert [found.token_bytes(i) for i in ids] == [expected.token_bytes(i) for i in ids]


@pytest.mark.parametrize("pre", PRE)
def test_what_else_is_known_of_a_tokenizer_is_the_same(pre: str) -> None:
    found, expected = pair(pre)
    assert found.is_byte_level
    assert found.vocab_size == expected.vocab_size
    assert found.special_ids == expected.special_ids == frozenset(range(len(SPECIAL_TOKENS)))
    assert found.special_tokens == expected.special_tokens
    assert found.chat_template == CHAT_TEMPLATE


def test_a_file_may_have_a_template_for_tools() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    found = read(trained("gpt-2"), **templates)
    assert found.chat_template == template_of({"default": "plain", "tool_use": "tools"})


def test_the_default_cuts_words_from_punctuation_and_digits_into_threes() -> None:
    """llama.cpp's default for files that do not name what cuts their texts. No tokenizer.json is like it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: i
        for i, token in enumerate([*SPECIAL_TOKENS, *alphabet, "++", "12", "123", "45", "1234", "a+", "+1"])
    }
    merges = [("+", "+"), ("1", "2"), ("12", "3"), ("4", "5"), ("123", "4"), ("a", "+"), ("+", "1")]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    for pre in ("default", None):
        found = read(made, pre)
        assert [found.token_bytes(i) for i in found.encode("a++12345")] == [b"a", b"++", b"123", b"45"]


@pytest.mark.parametrize(("pre", "spelled"), [("llama-bpe", [b"the"]), ("gpt-2", [b"t", b"h", b"e"])])
def test_a_word_of_the_vocabulary_needs_no_merges_where_the_file_says_llama(
    pre: str, spelled: list[bytes]
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet, "the"])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    found = read(made, pre)
    assert [found.token_bytes(i) for i in found.encode("the")] == spelled


# SentencePiece


def sentence_piece(vocabulary: dict[str, int], scores: dict[str, float], text: str) -> list[int]:
    """SentencePiece's BPE: of all neighbours that make a token, the best are merged, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        merged = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not merged:
            break
        _, i = min(merged)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        id
        for piece in pieces
        for id in (
            [vocabulary[piece]]
            if piece in vocabulary
            else [vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


@cache
def pieces() -> tuple[Tokenizer, dict[str, int], dict[str, float]]:
    made = metaspace_tokenizer()
    content = json.loads(made.to_str())
    merges = {left + right: float(-i) for i, (left, right) in enumerate(content["model"]["merges"])}
    ordinary = {
        token
        for token in made.get_vocab()
        if token not in (*SPECIAL_TOKENS, "<unk>") and not token.startswith("<0x")
    }
    scores = {token: merges.get(token, -1e6) for token in ordinary}
    return read(made), made.get_vocab(), scores


@settings(max_examples=examples(300))
@given(text=TEXTS.map(lambda text: text.replace("▁", " ")))
@example("the the  river runs")
@example("<s> <unk> <0x41>")
def test_pieces_are_those_that_sentence_piece_merges(text: str) -> None:
    found, vocabulary, scores = pieces()
    if not any(token in text for token in (*SPECIAL_TOKENS, "<unk>")):
        expected = sentence_piece(vocabulary, scores, text) if text else []
        assert found.encode(text) == expected
        assert found.encode(text, add_special=True) == [vocabulary[BOS], *expected]
    assert found.decode(found.encode(text)) == text
    assert not found.special_ids & set(found.encode(text)) - {vocabulary["<unk>"]}


@settings(max_examples=examples(100))
@given(text=TEXTS)
@example("the  river\n\n\nruns")
def test_pieces_by_a_list_of_merges_are_those_of_the_tokenizer(text: str) -> None:
    found, made = listed_pieces()
    assert found.encode(text) == made.encode(text)


@cache
def listed_pieces() -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a file like Gemma 4's, and that of the tokenizer.json it was made : without a first space."""
    made = metaspace_tokenizer()
    made.normalizer = normalizers.Replace(" ", "▁")
    listed = [" ".join(merge) for merge in json.loads(made.to_str())["model"]["merges"]]
    found = read(made, model="gemma4", merges=listed, scores=None, add_space_prefix=False)
    return found, Tokenizer(made.to_str(), {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD})


def test_special_tokens_are_parsed_where_that_is_asked_for() -> None:
    found, vocabulary, _ = pieces()
    ids = found.encode(f"{ROLES[1]}the{EOS}", parse_special=True)
    assert (ids[0], ids[-1]) == (vocabulary[ROLES[1]], vocabulary[EOS])
    assert not found.is_byte_level
    assert found.token_bytes(vocabulary["<0x0A>"]) == b"\n"
    assert found.special_ids == {vocabulary[token] for token in (*SPECIAL_TOKENS, "<unk>")}


def test_a_space_is_put_before_a_text_unless_the_file_says_otherwise() -> None:
    found, vocabulary, _ = pieces()
    plain = read(metaspace_tokenizer(), add_space_prefix=False)
    assert found.encode("river") == plain.encode(" river") == [vocabulary["▁river"]]
    assert plain.encode("river") != found.encode("river")
    assert plain.decode(plain.encode(" river")) == " river"
    assert plain.decode(plain.encode("river")) == found.decode(found.encode("river")) == "river"


# What is put around a text


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_the_file_says_what_is_put_around_a_text(add_bos: bool, add_eos: bool) -> None:
    found = read(trained("gpt-2"), add_bos_token=add_bos, add_eos_token=add_eos)
    assert found.encode("", add_special=True) == [0] * add_bos + [1] * add_eos


@pytest.mark.parametrize(
    ("pre", "adds_bos"), [("gpt-2", False), ("qwen2", False), ("llama-bpe", True), ("tekken", True)]
)
def test_without_a_word_of_the_file_it_is_as_llama_cpp_has_it(pre: str, adds_bos: bool) -> None:
    found = read(trained(pre), pre, add_bos_token=None)
    assert found.encode("", add_special=True) == [0] * adds_bos
    assert read(metaspace_tokenizer(), add_bos_token=None).encode("", add_special=True)


def test_tokens_that_users_define_are_found_in_any_text_and_shown() -> None:
    made = trained("gpt-2")
    made.add_tokens(["<tool>"])
    types = [3] * len(SPECIAL_TOKENS) + [1] * (made.get_vocab_size() - len(SPECIAL_TOKENS) - 1) + [4]
    found, tool = read(made, token_type=types), made.get_vocab_size() - 1
    assert found.encode("a<tool>")[-1] == tool
    assert found.decode([tool]) == "<tool>"
    assert tool not in found.special_ids


# Tokens that stand twice


def test_a_token_that_stands_twice_is_encoded_as_the_first_and_both_are_decoded() -> None:
    """As three of the tokens in Gemma 4's own files, https://github.com/ggml-org/llama.cpp/issues/25739."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, "hi", "x" * 9, "hi", SPECIAL_TOKENS[0], "ho"]
    once = list(dict.fromkeys(tokens))
    made = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(once)}, [("h", "i"), ("h", "o")])
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    types = [3 if token in SPECIAL_TOKENS else 1 for token in tokens]
    found = read(made, tokens=tokens, token_type=types)
    first, second, special = tokens.index("hi"), len(tokens) - 3, len(tokens) - 2
    assert found.encode("hiho") == [first, len(tokens) - 1]
    assert found.decode([second, first, second]) == "hihihi"
    assert found.piece(second) == "hi"
    assert found.token_bytes(second) == b"hi"
    assert found.encode(SPECIAL_TOKENS[0], parse_special=True) == [0]
    assert (found.decode([special]), found.decode([special], skip_special=False)) == ("", SPECIAL_TOKENS[0])
    assert found.special_ids == {*range(len(SPECIAL_TOKENS)), special}
    assert found.vocab_size == len(tokens)
    assert found.vocabulary == dict(enumerate(tokens))


def test_pieces_of_sentence_piece_may_stand_twice() -> None:
    made = metaspace_tokenizer()
    vocabulary = made.get_vocab()
    once = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [6 if token.startswith("<0x") else 3 if token in SPECIAL_TOKENS else 1 for token in once]
    scores = [0.0 if len(token) == 1 else -float(i) for i, token in enumerate(once)]
    plain = read(made, token_type=types, scores=scores)
    found = read(
        made, tokens=[*once, "▁river", "<0x0A>"], token_type=[*types, 1, 6], scores=[*scores, 0.0, 0.0]
    )
    assert found.encode("the river\nruns") == plain.encode("the river\nruns")
    assert found.decode([vocabulary["▁the"], len(once)]) == "the river"
    assert (found.is_byte(len(once) + 1), found.token_bytes(len(once) + 1)) == (True, b"\n")


# Files that are wrong


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model t5 is not supported; only gpt2, llama and gemma4 are"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        (
            {"pre": "poro-chat"},
            "tokenizer.ggml.pre poro-chat is not supported; only default, gpt-2",
        ),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which are not two tokens"),
        ({"merges": ["q \n水"]}, "no tokenizer can be made of its metadata"),
        ({"bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing or no token"),
        ({"bos_token_id": 70_000}, "tokenizer.ggml.bos_token_id is missing or no token"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({"model": "llama"}, "tokenizer.ggml.scores has 0 entries for"),
        ({"model": "llama", "scores": ["a"]}, "tokenizer.ggml.scores must be a list of numbers"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template must be a string"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_one_line(
    tmp_path: Path, entries: dict[str, Any], said: str
) -> None:
    path = make_file(trained("gpt-2"), tmp_path, **entries)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_tokenizer(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
