from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import decoders, models, pre_tokenizers, processors

from penstock.engine.errors import CheckpointError
from penstock.engine.text import tokenizer
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer().to_str())
METASPACE = Tokenizer(metaspace_tokenizer().to_str())


SPECIAL = ["<s>", "</s>", "<|user|>"]


def unigram_tokenizer() -> tokenizers.Tokenizer:
    """The special tokens are pieces of the vocabulary, with the best of scores, as SentencePiece writes them."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁</>|seru"]
    vocabulary = [(piece, 0.0 if piece in SPECIAL else -9.0) for piece in pieces]
    made = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return bos_and_eos(made)


def whole_words_tokenizer() -> tokenizers.Tokenizer:
    """Words that are in the vocabulary need no merges, as in Llama 3, and words end at spaces."""
    pieces = ["<unk>", *SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return bos_and_eos(made)


def bos_and_eos(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.add_special_tokens(["<unk>", *SPECIAL])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return made


KINDS = {
    "byte level": BYTE_LEVEL,
    "unigram": Tokenizer(unigram_tokenizer().to_str()),
    "whole words": Tokenizer(whole_words_tokenizer().to_str()),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=st.text()
    | st.lists(st.sampled_from([*SPECIAL, "<", "s", "<|end|>", "|>", " ", "é"]), max_size=9).map("".join)
)
@example("<|user|>")
@example("<|<|user|>user|>")
@example("</s></s> <s>")
def test_any_text_round_trips(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    text = text.replace("▁", " ")
    token_ids = tokenizer.encode(text)
    assert not tokenizer.special_ids & set(token_ids)
    assert tokenizer.decode(token_ids) == text
    around = tokenizer.encode("", add_special=True)
    assert tokenizer.encode(text, add_special=True) == [*around[:1], *token_ids, *around[1:]]


@pytest.mark.parametrize("kind", ["unigram", "whole words"])
def test_special_tokens_are_parsed_where_that_is_asked_for(kind: str) -> None:
    assert KINDS[kind].encode("<|user|> s", parse_special=True)[0] == 3


def test_what_cannot_be_spelled_is_the_unknown_token() -> None:
    content = json.loads(unigram_tokenizer().to_str())
    content["model"]["byte_fallback"] = False
    assert Tokenizer(json.dumps(content)).encode("é") == [0]


def test_a_special_token_of_one_character_has_no_text() -> None:
    made = tokenizers.Tokenizer(models.BPE({"#": 0, "a": 1}, [], ignore_merges=True))
    made.add_special_tokens(["#"])
    assert Tokenizer(made.to_str()).encode("a#a") == [1, 1]


def test_special_tokens_in_a_text_are_text_unless_asked_for() -> None:
    assert BYTE_LEVEL.id_of("<|end|>") not in BYTE_LEVEL.encode("say <|end|> now")
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("say <|end|> now")) == "say <|end|> now"
    assert BYTE_LEVEL.id_of("<|end|>") in BYTE_LEVEL.encode("say <|end|> now", parse_special=True)


def test_kinds_are_told_apart() -> None:
    assert BYTE_LEVEL.is_byte_level
    assert not METASPACE.is_byte_level


@given(st.text())
def test_token_bytes_are_the_text_in_pieces(text: str) -> None:
    joined = b"".join(BYTE_LEVEL.token_bytes(i) for i in BYTE_LEVEL.encode(text))
    assert joined == text.encode()


def test_token_bytes_of_odd_tokens() -> None:
    fallback = METASPACE.id_of("<0xE2>")
    assert fallback is not None
    assert METASPACE.token_bytes(fallback) == b"\xe2"
    end = BYTE_LEVEL.id_of("<|end|>")
    assert end is not None
    assert BYTE_LEVEL.token_bytes(end) == b"<|end|>"
    assert BYTE_LEVEL.token_bytes(10_000_000) == b""


def write(folder: Path, config: object = None, template: str | None = None) -> Path:
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, {"chat_template": "old"}, "new")).chat_template == "new"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("x", "x"),
        (None, None),
        ([{"name": "default", "template": "d"}, {"name": "other", "template": "o"}], "d"),
        ([{"name": "rag", "template": "r"}], None),
        ([{"name": "tool_use", "template": "t"}], "t"),
        ([{"name": "default"}, "rag", {"name": "tool_use", "template": 3}], None),
    ],
)
def test_templates_in_the_config(tmp_path: Path, template: object, found: str | None) -> None:
    assert Tokenizer.load(write(tmp_path, {"chat_template": template})).chat_template == found


NAMED = {
    "default": "\n  <{{ tools }}> \n\n",
    "rag": "{% for d in documents %}{{ d }}\n{% endfor %}\n",
    "tool_use": "  {% if tools %}{{ tools[0] }}{% endif %}\n ",
}


@pytest.mark.parametrize("kept", ["list", "files"])
def test_the_template_for_tools_or_documents_is_taken_where_there_are_some(tmp_path: Path, kept: str) -> None:
    """As Command R and Hermes have them: a list in tokenizer_config.json, or files as transformers writes them now."""
    if kept == "list":
        write(tmp_path, {"chat_template": [{"name": n, "template": source} for n, source in NAMED.items()]})
    else:
        write(tmp_path, {"chat_template": "old"}, NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("rag", "tool_use"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    both = Tokenizer.load(tmp_path).chat_template
    assert both is not None
    cases: list[tuple[list[str] | None, list[str] | None, str]] = [
        (["a"], None, "tool_use"),
        ([], [], "default"),
        (None, None, "default"),
        (None, ["d"], "rag"),
        (["a"], ["d", "e"], "rag"),
    ]
    for tools, documents, name in cases:
        fields = {"tools": tools, "documents": documents}
        rendered, alone = (
            Environment(trim_blocks=True, lstrip_blocks=True).from_string(source).render(fields)
            for source in (both, NAMED[name])
        )
        assert rendered == alone


def test_named_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    loaded = Tokenizer.load(write(tmp_path, config))
    assert loaded.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


def test_older_files_are_read_where_transformers_reads_them(tmp_path: Path) -> None:
    beside = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(beside))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "beside"}))
    loaded = Tokenizer.load(write(tmp_path, {"eos_token": "<|user|>", "chat_template": None}))
    assert loaded.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    assert loaded.chat_template == "beside"
    newer = {"eos_token": "<|user|>", "added_tokens_decoder": {}, "chat_template": "own"}
    loaded = Tokenizer.load(write(tmp_path, newer))
    assert (loaded.special_tokens, loaded.chat_template) == ({"eos_token": "<|user|>"}, "own")
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json is not JSON"):
        Tokenizer.load(write(tmp_path, {}))


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_the_tokens_of_a_text_become_a_list_once_and_are_counted_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Millions of them would hold the interpreter for long."""
    looked_at: list[int] = []

    class TokenIds(list[int]):
        def __getitem__(self, place: Any) -> Any:
            part = super().__getitem__(place)
            looked_at.append(len(part))
            return part

    class Encoding:
        num_lists = 0

        @property
        def ids(self) -> TokenIds:
            self.num_lists += 1
            return TokenIds([9] * 200_000)

    encoding = Encoding()
    monkeypatch.setattr(tokenizer, "_encode", lambda *_: encoding)
    assert len(BYTE_LEVEL.encode("a")) == 200_000
    assert encoding.num_lists == 1
    assert (sum(looked_at), max(looked_at)) == (200_000, 65_536)
