"""Makes a tokenizer from the metadata of a GGUF file: the tokenizer.json that it would have in a directory.

`tokenizer.ggml.pre` and the other keys have llama.cpp's meaning (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.gguf.config import token_id
from penstock.engine.model.gguf.container import read_header
from penstock.engine.text.tokenizer import Tokenizer, template_of

Json = dict[str, object]


class TokenType(IntEnum):
    """The type of a token of the vocabulary."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Splitting:
    """The way a tokenizer of bytes cuts a text into the pieces that merges do not cross."""

    patterns: tuple[str, ...]
    """Each is applied to the pieces that the one before it left."""
    has_whole_words: bool = False
    """Whether a piece that is in the vocabulary becomes its token, regardless of merges."""
    adds_bos: bool = False
    """Unless add_bos_token says otherwise."""
    is_composed: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_WORDS = rf"{_CONTRACTION}|{_WORD}"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

_DEFAULT = Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN = Splitting((_GPT2,))
_DIGITS = Splitting((r"\p{N}", _GPT2))
_LLAMA3 = Splitting((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), has_whole_words=True, adds_bos=True)
_QWEN2 = Splitting((rf"{_WORDS}|\p{{N}}|{_REST}",))
_MARKED_WORD, _NO_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = Splitting((rf"{_CONTRACTION}|{_MARKED_WORD}|\p{{N}}|{_NO_WORD}|{_SPACE}",))
_TURKISH = Splitting((rf"{_WORD}|\p{{N}}|{_REST}",))
_CL100K = Splitting(_LLAMA3.patterns)
_GLM4 = replace(_CL100K, has_whole_words=True)
_MINICPM5 = Splitting((r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_REST}"), has_whole_words=True)


def _by_case(ending: str, numbers: str, but: str = "", closing: str = r"[\r\n/]*") -> str:
    """Words begin where a large letter follows a small one.

    Args:
        but: the letters that no word has.
        closing: what may follow other characters.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (f"[{case}&&[^{but}]]" if but else f"[{case}]" for case in (_UPPER, _LOWER))
    words = rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{closing}|{_SPACE}"


_TEKKEN = Splitting((_by_case("", r"\p{N}"),), has_whole_words=True, adds_bos=True)
_O200K = Splitting((_by_case(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))
_OF_KIMI = _by_case(f"{_CONTRACTION}?", r"\p{N}{1,3}", but=r"\p{Han}", closing=r"[\r\n]*")
_KIMI = Splitting((rf"\p{{Han}}+|{_OF_KIMI}",))
_AYA = Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.patterns))
_SEED = Splitting((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",))
_SUPERBPE = Splitting((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))
_VIKING = Splitting((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))
_CASED = (
    r"(?:(?![\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}"
    r"\x{AB30}-\x{AB68}\x{10500}-\x{10C7F}\x{10D00}-\x{1189F}\x{118E0}-\x{1E8FF}])[\p{Lu}\p{Ll}\p{Lt}])"
)
"""Letters with a case, except the ones that the expression of DeepSeek's first models leaves out."""
_DEEPSEEK = Splitting(
    (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    )
)
_DEEPSEEK3 = Splitting(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        rf"|{_SPACE}",
    )
)

SPLITTINGS: dict[str, Splitting] = {
    name: splitting
    for splitting, names in (
        (_DEFAULT, "default"),
        (_PLAIN, "gpt-2 phi-2 olmo mpt exaone4 a.x-4.0 mellum trillion granite-docling"),
        (_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
        (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2"),
        (replace(_QWEN2, is_composed=True), "qwen2"),
        (_QWEN2, "deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open"),
        (_QWEN35, "qwen35"),
        (_TURKISH, "ufakzeka"),
        (_CL100K, "dbrx smaug-bpe chatglm-bpe"),
        (_GLM4, "glm4"),
        (_MINICPM5, "minicpm5"),
        (_DEEPSEEK, "deepseek-llm"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK3, "deepseek-v3 hunyuan-dense"),
        (_O200K, "gpt-4o llama4 minimax-m2"),
        (_KIMI, "kimi-k2"),
        (_AYA, "tiny_aya"),
        (_SEED, "seed-coder"),
        (_SUPERBPE, "superbpe"),
        (_TEKKEN, "tekken"),
        (_VIKING, "viking"),
    )
    for name in names.split()
}
"""By `tokenizer.ggml.pre`: all that files of the kinds that are served have."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file, with its chat template.

    Raises:
        CheckpointError: names the part that is missing, broken or not supported.
    """
    fields = read_header(path).fields
    vocabulary = _Vocabulary.read(fields)
    content = _MODELS[fields.one_of("tokenizer.ggml.model", *_MODELS)](fields, vocabulary)
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    template = template_of({name: fields.text(key, "") or None for name, key in keys.items()})
    try:
        return Tokenizer(content, vocabulary.named, template, repeated=vocabulary.repeated)
    except Exception as error:  # tokenizers raises plain Exception for a tokenizer that it cannot make
        said = " ".join(str(error).split())
        raise CheckpointError(f"{path}: no tokenizer can be made of its metadata: {said:.200}") from error


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: tuple[int, ...]
    named: Json
    """The tokens that templates refer to, by name: bos_token, eos_token, ..."""

    @classmethod
    def read(cls, fields: Fields) -> _Vocabulary:
        tokens, types = fields.strings("tokenizer.ggml.tokens"), fields.integers("tokenizer.ggml.token_type")
        if not tokens:
            raise fields.error("tokenizer.ggml.tokens is missing")
        if len(types) != len(tokens):
            raise fields.error(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        ids = {
            f"{name}_token": token_id(fields, key)
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        return cls(tokens, types, {name: tokens[i] for name, i in ids.items() if i is not None})

    @cached_property
    def ids(self) -> dict[str, int]:
        """A token that stands twice, as three do in Gemma 4's own files, is encoded as the first of them."""
        return {token: i for i, token in reversed(list(enumerate(self.tokens)))}

    @cached_property
    def repeated(self) -> dict[int, int]:
        """The ids of tokens that stood before, and the ids that they are encoded as."""
        return {i: first for i, token in enumerate(self.tokens) if (first := self.ids[token]) != i}

    def of(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        """The tokens of these types, with their ids."""
        found = ((i, token) for i, token in enumerate(self.tokens) if self.types[i] in types)
        return ((i, token) for i, token in found if i not in self.repeated)


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> Json:
    """BPE over the bytes of a text, as GPT-2 has it."""
    splitting = SPLITTINGS[fields.one_of("tokenizer.ggml.pre", *SPLITTINGS, default="default")]
    bytes_of_a_piece: Json = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitting.patterns
    ]
    return _content(
        fields,
        vocabulary,
        normalizer={"type": "NFC"} if splitting.is_composed else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, bytes_of_a_piece]},
        decoder=bytes_of_a_piece,
        model={"ignore_merges": splitting.has_whole_words, "merges": _two_part_merges(fields)},
        adds_bos=splitting.adds_bos,
    )


def _two_part_merges(fields: Fields) -> list[tuple[str, str]]:
    return [_two_parts(fields, merge) for merge in fields.strings("tokenizer.ggml.merges")]


def _two_parts(fields: Fields, merge: str) -> tuple[str, str]:
    space = merge.find(" ", 1)
    if space < 0:
        raise fields.error(f"tokenizer.ggml.merges has {merge!r:.80}, which are not two tokens")
    return merge[:space], merge[space + 1 :]


def _sentence_piece(fields: Fields, vocabulary: _Vocabulary) -> Json:
    """BPE over characters, as in SentencePiece: spaces are ▁, and characters outside the vocabulary become bytes."""
    return _of_characters(fields, vocabulary, _merges(vocabulary, _scores(fields, len(vocabulary.tokens))))


def _listed_merges(fields: Fields, vocabulary: _Vocabulary) -> Json:
    """The same with a list of merges, as Gemma 4 has it."""
    return _of_characters(fields, vocabulary, _two_part_merges(fields))


def _of_characters(fields: Fields, vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]]) -> Json:
    has_prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix: list[Json] = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    backwards: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    unknown = next((token for _, token in vocabulary.of(TokenType.UNKNOWN)), None)
    return _content(
        fields,
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [*backwards, *strip]},
        model={
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": merges,
        },
        adds_bos=True,
    )


def _scores(fields: Fields, count: int) -> list[float]:
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != count:
        raise fields.error(f"tokenizer.ggml.scores has {len(scores)} entries for {count} tokens")
    return scores


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes, in their order.

    It has no list of them: of all neighbours that make a token together, it merges the pair whose token has the best
    score. So each two tokens that make a third are a merge, and the score of the third is its place.
    """
    ordinary = {token: i for i, token in vocabulary.of(TokenType.NORMAL)}
    begins: list[tuple[str, int]] = []
    """The tokens that the token begins with: in alphabetic order they come right before it."""
    wholes, lefts, rights = list[int](), list[int](), list[int]()
    for token in sorted(ordinary):
        while begins and not token.startswith(begins[-1][0]):
            begins.pop()
        whole = ordinary[token]
        for begin, left in begins:
            if (right := ordinary.get(token[len(begin) :])) is not None:
                wholes.append(whole)
                lefts.append(left)
                rights.append(right)
        begins.append((token, whole))
    keys = np.array(rights), np.array(lefts), -np.array(scores)[wholes]
    tokens, order = vocabulary.tokens, np.lexsort(keys)
    return [(tokens[lefts[place]], tokens[rights[place]]) for place in order.tolist()]


def _content(
    fields: Fields,
    vocabulary: _Vocabulary,
    *,
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
    model: Json,
    adds_bos: bool,
) -> Json:
    """The content of a tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": vocabulary.types[i] != TokenType.USER_DEFINED,
            }
            for i, token in vocabulary.of(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
            if token
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around(fields, vocabulary, adds_bos),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            **model,
        },
    }


def _around(fields: Fields, vocabulary: _Vocabulary, adds_bos: bool) -> Json:
    """Puts the tokens around a text that belong there."""
    added = {
        "bos_token": fields.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": fields.flag("tokenizer.ggml.add_eos_token", False),
    }
    wanted = [name for name, is_wanted in added.items() if is_wanted]
    for name in wanted:
        if name not in vocabulary.named:
            raise fields.error(
                f"tokenizer.ggml.{name}_id is missing or no token of the vocabulary, and every text "
                f"is to get a {name}"
            )
    texts, ids = {name: str(vocabulary.named[name]) for name in wanted}, vocabulary.ids
    tokens = {name: [{"SpecialToken": {"id": text, "type_id": 0}}] for name, text in texts.items()}
    before, after = tokens.get("bos_token", []), tokens.get("eos_token", [])
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, second, *after],
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in texts.values()
        },
    }


_MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _listed_merges}
"""By `tokenizer.ggml.model`."""
