"""Text in pieces, for the hard parts of Unicode: what is shown is whole characters, soon, and in the end all of it."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.text.detokenizer import make_detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import byte_level_tokenizer, metaspace_tokenizer
from tests.few import examples

BYTE_LEVEL = Tokenizer(byte_level_tokenizer().to_str())
METASPACE = Tokenizer(metaspace_tokenizer().to_str())
BYTES = {
    BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size) if i not in BYTE_LEVEL.special_ids
}
FALLBACK = [METASPACE.id_of(f"<0x{byte:02X}>") or 0 for byte in range(256)]

people = st.sampled_from("👩👨👧👦🧑")
skins = st.sampled_from(["", "🏻", "🏽", "🏿"])
families = st.lists(st.builds(str.__add__, people, skins), min_size=1, max_size=4).map("\u200d".join)
flags = st.lists(st.characters(min_codepoint=0x1F1E6, max_codepoint=0x1F1FF), min_size=2, max_size=2).map(
    "".join
)
accents = st.text(alphabet="\u0300\u0301\u0308\u0323\u20d2", max_size=4)
accented = st.builds(str.__add__, st.sampled_from("aeiñक한"), accents)
keycaps = st.sampled_from(["1\ufe0f\u20e3", "#\ufe0f\u20e3", "❤️", "☺︎"])
scripts = st.text(alphabet="日本語ไทยעבריתعربيहिन्दीру", max_size=6)
plain = st.text(alphabet="the river \n\t.", max_size=8)
unicode_texts = st.lists(families | flags | accented | keycaps | scripts | plain, max_size=6).map("".join)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


def byte_tokens(raw: bytes) -> list[int]:
    """One token for each byte: every border that there can be."""
    return [BYTES[bytes([byte])] for byte in raw]


def test_every_byte_is_a_token_of_both_vocabularies() -> None:
    assert len(byte_tokens(bytes(range(256)))) == 256
    assert [METASPACE.token_bytes(i) for i in FALLBACK] == [bytes([byte]) for byte in range(256)]


@settings(max_examples=examples(70), deadline=None)
@given(unicode_texts)
def test_a_text_that_comes_byte_by_byte_has_no_half_characters(text: str) -> None:
    parts = pieces(BYTE_LEVEL, byte_tokens(text.encode()))
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert all(len(part) <= 1 for part in parts)
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=examples(70), deadline=None)
@given(unicode_texts)
def test_a_character_is_shown_with_its_last_byte(text: str) -> None:
    parts = pieces(BYTE_LEVEL, byte_tokens(text.encode()))
    at = -1
    for character in text:
        at += len(character.encode())
        assert parts[at] == character


@settings(max_examples=examples(50), deadline=None)
@given(unicode_texts)
def test_nothing_is_normalised_on_the_way(text: str) -> None:
    """Composed and decomposed forms are different texts, and stay so."""
    for form in ("NFC", "NFD"):
        written = unicodedata.normalize(form, text)
        assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(written))) == written


@settings(max_examples=examples(70), deadline=None)
@given(st.binary(max_size=24))
def test_bytes_that_are_no_text_become_what_python_makes_of_them(raw: bytes) -> None:
    token_ids = byte_tokens(raw)
    joined = "".join(pieces(BYTE_LEVEL, token_ids))
    assert joined == raw.decode("utf-8", "replace")
    assert joined == BYTE_LEVEL.decode(token_ids)


@settings(max_examples=examples(50), deadline=None)
@given(unicode_texts.filter(bool), st.binary(min_size=1, max_size=4), unicode_texts)
def test_broken_bytes_in_the_middle_spoil_no_character_after_them(
    before: str, noise: bytes, after: str
) -> None:
    """UTF-8 finds its feet again with the first byte that can begin a character."""
    parts = pieces(BYTE_LEVEL, byte_tokens(before.encode() + noise + after.encode()))
    joined = "".join(parts)
    assert joined.startswith(before)
    assert joined.endswith(after)


@settings(max_examples=examples(50), deadline=None)
@given(unicode_texts, st.data())
def test_what_is_shown_early_is_a_beginning_of_what_is_shown_in_the_end(
    text: str, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([BYTE_LEVEL, METASPACE]))
    token_ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    early = "".join(pieces(tokenizer, token_ids[:cut])[:-1])
    assert "".join(pieces(tokenizer, token_ids)).startswith(early)


@settings(max_examples=examples(50), deadline=None)
@given(unicode_texts.filter(bool))
def test_a_sequence_cut_inside_a_character_shows_it_as_one_mark_and_only_in_the_end(text: str) -> None:
    character = text[-1]
    if len(character.encode()) == 1:
        character = "€"
    token_ids = byte_tokens((text + character).encode()[:-1])
    parts = pieces(BYTE_LEVEL, token_ids)
    assert "".join(parts[:-1]) == text
    assert parts[-1] == "\ufffd"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])
def test_flush_gives_everything_once_and_leaves_a_fresh_start(tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(tokenizer)
    euro = byte_tokens("€".encode()) if tokenizer is BYTE_LEVEL else [FALLBACK[b] for b in "€".encode()]
    for _ in range(3):
        text = "".join(detokenizer.push(token_id) for token_id in euro) + detokenizer.flush()
        assert text == "€"
        assert detokenizer.flush() == ""
