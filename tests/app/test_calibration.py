"""The texts that a model is calibrated with: which are taken, and which are held out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.app import calibration
from penstock.app.calibration import make_texts
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.errors import OperatorError
from penstock.engine.model.parse import read_config
from penstock.engine.model.texts import Text, Texts
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import make_checkpoint

WORDS = "a server keeps its promises, and says so when it cannot; "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text(WORDS * 400)
    return file


def texts(checkpoint: Path, file: Path, tokens: int = 4096, **config: Any) -> Texts:
    return make_texts(checkpoint, replace(read_config(checkpoint), **config), file, tokens, is_needed=True)


def test_a_piece_in_five_is_held_out(checkpoint: Path, text: Path) -> None:
    found = texts(checkpoint, text, max_position=100)
    bos = read_config(checkpoint).bos_token_id
    pieces = [*found.calibration, *found.held_out]
    assert all(piece.token_ids[0] == bos for piece in pieces)
    assert max(len(piece.token_ids) for piece in pieces) == 100
    assert 3900 < sum(len(piece.token_ids) for piece in found.calibration) <= 4096
    assert len(found.held_out) == pytest.approx(len(pieces) / 5, abs=1)


def test_the_pieces_are_the_text(checkpoint: Path, text: Path) -> None:
    found = texts(checkpoint, text, 100_000)
    pieces = [*found.calibration]
    for number, piece in enumerate(found.held_out):
        pieces.insert(1 + 5 * number, piece)
    tokenizer = Tokenizer.load(checkpoint)
    ids = [token for piece in pieces for token in piece.token_ids[1:]]
    assert tokenizer.decode(ids) == text.read_text()


def test_json_lines(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{i} {WORDS}", "id": i}) for i in range(200)) + "\n\n")
    found = texts(checkpoint, file)
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.decode(found.calibration[0].token_ids[1:]) == f"0 {WORDS}"
    assert tokenizer.decode(found.held_out[0].token_ids[1:]) == f"1 {WORDS}"
    assert tokenizer.decode(found.calibration[1].token_ids[1:]) == f"2 {WORDS}"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\nno', 'line 2: this is no JSON object with "text"'),
        ("a.jsonl", b"[1]", 'line 1: this is no JSON object with "text"'),
        ("a.jsonl", b'{"text": 3}', 'line 1: "text" is no string'),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.txt", b"short", "tokens are too few, at least 1,024 are needed"),
        ("a.txt", b"", "0 tokens are too few"),
    ],
)
def test_broken_files(name: str, content: bytes, said: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OperatorError) as caught:
        texts(checkpoint, tmp_path / name)
    assert said in str(caught.value)


def pieces(*lengths: int) -> list[Text]:
    return [Text([number] * length) for number, length in enumerate(lengths)]


def test_the_second_piece_and_every_fifth_after_it_are_held_out(tmp_path: Path) -> None:
    given = pieces(*[200] * 9)
    found = calibration._split(iter(given), 1200, tmp_path)
    assert found == Texts([given[number] for number in (0, 2, 3, 4, 5, 7)], [given[1], given[6]])
    assert calibration._split(iter(given), 1399, tmp_path) == found


@pytest.mark.parametrize(("lengths", "count"), [([512, 512, 511], "1,023"), ([1024], "1,024")])
def test_too_few_tokens_are_told(lengths: list[int], count: str) -> None:
    with pytest.raises(OperatorError) as caught:
        calibration._split(iter(pieces(*lengths)), 4096, Path("a.txt"))
    said = f"--calibration a.txt: {count} tokens are too few, at least 1,024 are needed"
    assert str(caught.value) == said


def test_enough_are_enough() -> None:
    given = pieces(512, 1, 512)
    assert calibration._split(iter(given), 4096, Path()) == Texts([given[0], given[2]], [given[1]])


def test_the_demo_model_has_conversations_of_its_own() -> None:
    texts = json.loads(calibration._DEMO_TEXTS.read_text())
    found = make_texts(DEMO_MODEL, read_config(DEMO_MODEL), None, 2048, is_needed=True)
    for name, most in (("calibration", 2048), ("held_out", 512)):
        taken, count = list[Text](), 0
        for piece in texts[name]:
            count += len(piece["token_ids"])
            if count > most:
                break
            taken.append(Text(piece["token_ids"], [mark == "1" for mark in piece["counted"]]))
        assert getattr(found, name) == taken
        assert taken


def test_the_first_pieces_are_those_within_the_bound() -> None:
    given = [{"token_ids": [1, 2], "counted": "01"}, {"token_ids": [3, 4], "counted": "11"}]
    both = [Text([1, 2], [False, True]), Text([3, 4], [True, True])]
    assert calibration._first(given, 4) == both
    assert calibration._first(given, 3) == both[:1]


def test_pieces_have_at_most_512_tokens_and_more_than_a_start(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in ("", "a", WORDS * 400)))
    config = read_config(checkpoint)
    found = [piece.token_ids for piece in calibration._pieces_of(file, checkpoint, config, 4096)]
    tokenizer = Tokenizer.load(checkpoint)
    bos, ids = config.bos_token_id, tokenizer.encode(WORDS * 400)
    expected = [ids[first : first + 511] for first in range(0, len(ids), 511)]
    assert found == [[bos, *rest] for rest in (tokenizer.encode("a"), *expected)]
    config = replace(config, bos_token_id=None)
    found = [piece.token_ids for piece in calibration._pieces_of(file, checkpoint, config, 4096)]
    assert found == [ids[first : first + 512] for first in range(0, len(ids), 512)]


def test_no_more_of_a_file_is_read_than_is_wanted(
    checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(calibration._texts_of(text, 8)) == ["a server"]
    asked = []

    def noted(_: Path, most: int) -> Iterator[str]:
        asked.append(most)
        return iter([WORDS * 400])

    monkeypatch.setattr(calibration, "_texts_of", noted)
    texts(checkpoint, text, 1024)
    assert asked == [32 * 1024]


def test_what_needs_no_text_has_none(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    assert make_texts(checkpoint, config, None, 1024, is_needed=False) == Texts()
    with pytest.raises(OperatorError, match=r"^--calibration-tokens must be at least 1,024, and is 1,023$"):
        make_texts(checkpoint, config, None, 1023, is_needed=False)
