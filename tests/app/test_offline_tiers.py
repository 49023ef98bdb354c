"""KV that outlives its place in memory, with a real model: read back, or after a restart, it gives the same tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.app.offline.answers import Answer
from penstock.engine.kernels import select
from penstock.engine.kernels.cpu.native import NativeUnavailable
from penstock.engine.planning.outside import STATE
from penstock.engine.tiers.block_file import HEADER_BYTES
from penstock.engine.tiers.folder import SUFFIX
from tests.engine.checkpoints import byte_level_tokenizer, write_tokenizer
from tests.engine.families import STATES

NUM_BLOCKS = 40
"""Room for one of the prompts, and a bit."""
PROMPTS = [
    " ".join(f"{animal} number {i} went to the river and saw a {animal}." for i in range(30))
    for animal in ("fox", "bear", "wolf")
]


def make(**settings: Any) -> LLM:
    return LLM(**{"progress": False, "num_blocks": NUM_BLOCKS, "max_num_seqs": 4, **settings})


def answer(llm: LLM, prompt: str) -> Answer:
    return llm.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True)[0]


def text(answer: Answer) -> str:
    return answer.choices[0].text


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/*/*{SUFFIX}"))


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with make() as llm:
        return [text(answer(llm, prompt)) for prompt in PROMPTS]


def test_what_was_evicted_is_read_back(expected: list[str], tmp_path: Path) -> None:
    with make(kv_disk=tmp_path / "kv", kv_host_bytes=1 << 30) as llm:
        for _ in range(2):
            told = [answer(llm, prompt) for prompt in PROMPTS]
            assert [text(one) for one in told] == expected
        assert llm.tiers_use.num_fetched_blocks > 0
        assert llm.tiers_use.tiers["host"].num_hits > 0
        assert all(one.num_cached_tokens >= 160 for one in told), "without a tier, none would be cached"


def test_a_restarted_server_finds_it(expected: list[str], tmp_path: Path) -> None:
    for is_first in (True, False):
        with make(kv_disk=tmp_path) as llm:
            told = [answer(llm, prompt) for prompt in PROMPTS]
            assert [text(one) for one in told] == expected
            if not is_first:
                assert told[0].num_cached_tokens >= 160
                assert llm.tiers_use.tiers["disk"].num_hits > 0


def test_damaged_files_are_computed_again(
    expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(kv_disk=tmp_path) as llm:
        answer(llm, PROMPTS[0])
    for number, path in enumerate(files(tmp_path)):
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + number % 100] ^= 1
        path.write_bytes(data[: -1 - number % 2] if number % 3 == 0 else data)
    with make(kv_disk=tmp_path) as llm, caplog.at_level(logging.WARNING):
        assert text(answer(llm, PROMPTS[0])) == expected[0]
        assert llm.tiers_use.num_fetched_blocks == 0
    assert "is lost, its tokens are computed again" in caplog.text


def test_another_model_or_type_finds_nothing(expected: list[str], tmp_path: Path) -> None:
    with make(kv_disk=tmp_path) as llm:
        answer(llm, PROMPTS[0])
    assert files(tmp_path)
    with make(kv_disk=tmp_path, kv_dtype="int8") as llm:
        answer(llm, PROMPTS[0])
        assert llm.tiers_use.num_fetched_blocks == 0
    with make(kv_disk=tmp_path) as llm:
        assert text(answer(llm, PROMPTS[0])) == expected[0]
        assert llm.tiers_use.num_fetched_blocks > 0


def test_a_folder_of_somebody_else_is_left_alone(
    expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "thesis.txt").write_text("chapter 1")
    with make(kv_disk=tmp_path) as llm:
        assert text(answer(llm, PROMPTS[0])) == expected[0]
        assert not llm.tiers_use.tiers
    assert "has other files in it" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def refuse(*_: object) -> None:
    raise NativeUnavailable("this test is of plain torch")


@pytest.fixture(scope="module", params=["Qwen 3.5", "Granite 4 H", "Mamba 2"])
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers keep a state: with attention in others, or without any."""
    tokenizer, folder = byte_level_tokenizer(), tmp_path_factory.mktemp("recurrent")
    STATES[request.param].make(folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2048)
    write_tokenizer(folder, tokenizer)
    return folder


@pytest.mark.parametrize("is_native", [True, False])
def test_states_are_kept_beside_blocks(
    recurrent: Path, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt goes on from the state at its last full block, also after a restart; without the state, from nothing."""
    if not is_native:
        monkeypatch.setattr(select, "check_native", refuse)
    options: dict[str, Any] = {"model": str(recurrent), "dtype": "float32", "max_model_len": 2048}
    options |= {"num_blocks": 400}
    with make(**options) as llm:
        expected = [text(answer(llm, prompt)) for prompt in PROMPTS[:2]]
    for is_first in (True, False):
        with make(kv_disk=tmp_path, **options) as llm:
            told = [answer(llm, prompt) for prompt in PROMPTS[:2]]
            assert [text(one) for one in told] == expected
            if not is_first:
                assert told[0].num_cached_tokens >= 160, (
                    "the first is read, since nothing is known of the disk"
                )
                assert llm.tiers_use.tiers["disk"].num_hits > 0
    for path in tmp_path.glob(f"*/*/*-{STATE}{SUFFIX}"):
        path.write_bytes(path.read_bytes()[:-1])
    with make(kv_disk=tmp_path, **options) as llm:
        assert text(answer(llm, PROMPTS[0])) == expected[0]
        assert answer(llm, PROMPTS[1]).num_cached_tokens == 0
