from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.detokenizer import make_detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer

TOKENIZERS = [Tokenizer(byte_level_tokenizer().to_str()), Tokenizer(metaspace_tokenizer().to_str())]
KINDS = st.sampled_from(TOKENIZERS)

HARD = [
    "👩‍👩‍👧‍👦 family",
    "🏳️‍🌈👍🏽",
    "日本語のテキスト",
    "e\u0301a\u0308\u0323 ñ",
    "עברית и по-русски",
    "  leading, trailing  ",
    "a\tb\nc\r\n\n",
    "\ufffd is a character too",
    "the the the river",
    "",
]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "metaspace"])
@pytest.mark.parametrize("text", HARD)
def test_pieces_join_to_the_text_and_none_is_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(KINDS, st.text())
def test_any_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == tokenizer.decode(tokenizer.encode(text))


@given(st.data())
def test_any_tokens_join_to_what_decode_gives(data: st.DataObject) -> None:
    """Bytes that are no character, special tokens in their midst and ids that do not exist included."""
    tokenizer = data.draw(KINDS)
    bytes_of_euro = tokenizer.encode("€")
    token = st.integers(0, tokenizer.vocab_size + 2) | st.sampled_from(bytes_of_euro)
    token_ids = data.draw(st.lists(token | st.sampled_from(sorted(tokenizer.special_ids))))
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(st.text(min_size=1), st.data())
def test_a_character_is_shown_as_soon_as_it_is_whole(text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[0]
    token_ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    shown = "".join(pieces(tokenizer, token_ids[:cut])[:-1])
    certain = b"".join(tokenizer.token_bytes(i) for i in token_ids[:cut]).decode("utf-8", "ignore")
    assert shown == certain


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "metaspace"])
def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    special = sorted(tokenizer.special_ids)
    assert special
    token_ids = [special[0], *tokenizer.encode("the river"), special[-1]]
    assert "".join(pieces(tokenizer, token_ids)) == "the river"


def test_an_id_without_a_token_does_not_end_a_run_of_bytes() -> None:
    tokenizer = TOKENIZERS[1]
    before, after = tokenizer.id_of("<0x80>"), tokenizer.id_of("<0x00>")
    assert before is not None
    assert after is not None
    token_ids = [before, tokenizer.vocab_size, after]
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_token_is_decoded_once_however_often_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detokenizer runs on the step thread, for every token of every sequence."""
    tokenizer = Tokenizer(metaspace_tokenizer().to_str())
    token_ids = tokenizer.encode("the river and the river")
    decoded: list[list[int]] = []
    decode = tokenizer.decode

    def counted(token_ids: list[int], *, skip_special: bool = True) -> str:
        decoded.append(token_ids)
        return decode(token_ids, skip_special=skip_special)

    expected = pieces(tokenizer, token_ids)
    monkeypatch.setattr(tokenizer, "decode", counted)
    assert pieces(tokenizer, token_ids) == expected
    assert decoded == [token_ids[:1]], "the first token of a text depends on its place"
