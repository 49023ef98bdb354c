"""A config.json with absurd numbers is refused by name, or loads, at a cost that does not follow from the number."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError, NotEnoughMemory
from penstock.engine.execution import loader
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import MAX_WINDOWED_TOKENS, load_model
from penstock.engine.fields import Fields
from penstock.engine.model.families.common import MAX_POSITIONS
from penstock.engine.model.parse import parse_config, read_config
from penstock.engine.model.safetensors import TensorEntry, TensorFiles
from penstock.engine.model.tensors import check_tensors
from penstock.engine.program.interpreter import Interpreter
from tests.engine.checkpoints import FAMILIES, make_checkpoint, make_config

MOST_BYTES = 4 << 20
"""The most of Python's memory that one load of a tiny checkpoint, or its refusal, may take."""

ABSURD = (10**6, 2**31 - 1, 10**12)
BACKED_BY_TENSORS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
UNBACKED = (
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rms_norm_eps",
    "rope_theta",
)
IN_THE_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

ON_EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
WITH_ABSURD_NUMBERS = pytest.mark.parametrize("number", ABSURD)


class CountingEntries(dict[str, TensorEntry]):
    """The tensors of a checkpoint, and how often one was looked for."""

    num_lookups = 0

    def get(self, name: str, default: object = None, /) -> TensorEntry | None:  # type: ignore[override]
        self.num_lookups += 1
        assert default is None
        return super().get(name)


class CountingFiles(TensorFiles):
    entries: CountingEntries

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entries = CountingEntries(self.entries)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders = {family: make_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return lambda family: folders[family] / "model.safetensors"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[CountingFiles]:
    """The tensor files that `load_model` opens."""
    made: list[CountingFiles] = []

    def open_files(folder: Path) -> CountingFiles:
        made.append(CountingFiles(folder))
        return made[-1]

    monkeypatch.setattr(loader, "open_files", open_files)
    return made


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: Callable[[str], Path]) -> Callable[..., Path]:
    """Makes a checkpoint whose config.json says something else than its tensors."""

    def make(family: str, **changes: object) -> Path:
        (tmp_path / "model.safetensors").symlink_to(tensors(family))
        (tmp_path / "config.json").write_text(json.dumps({**make_config(family), **WINDOWS, **changes}))
        return tmp_path

    return make


def load(folder: Path) -> LoadedModel | CheckpointError | NotEnoughMemory:
    """Loads in plain torch, or returns the refusal; neither may take more than MOST_BYTES."""
    options = LoadOptions(device="cpu", block_size=8, max_num_seqs=2, max_batch_tokens=16, kv_bytes=1 << 20)
    tracemalloc.start()
    try:
        return load_model(folder, options, lambda _: None, lambda *_: None)
    except (CheckpointError, NotEnoughMemory) as error:
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES


def assert_names(found: object, field: str) -> None:
    assert isinstance(found, CheckpointError | NotEnoughMemory), field
    assert field in str(found)
    assert "\n" not in str(found)
    assert len(str(found)) < 400


def assert_bounded(model: LoadedModel) -> None:
    """The rotary tables have no more rows than the KV cache has places, and a block table no more entries than blocks.

    Where all layers have a sliding window, a sequence may be longer than the cache, up to a bound.
    """
    assert isinstance(model.decoder, Interpreter)
    most = model.kv.num_blocks * model.kv.block_size
    if model.config.context_window:
        most = max(most, MAX_WINDOWED_TOKENS)
    assert all(len(op.heads.cos) <= most for op in model.decoder.program.ops if op.heads is not None)
    assert model.table.max_blocks <= -(-most // model.kv.block_size) * model.table.num_tables


def assert_bounded_or_named(found: object, field: str) -> None:
    if isinstance(found, LoadedModel):
        assert_bounded(found)
    else:
        assert_names(found, field)


@ON_EVERY_FAMILY
@WITH_ABSURD_NUMBERS
@pytest.mark.parametrize("field", BACKED_BY_TENSORS)
def test_a_size_that_the_tensors_do_not_have_is_refused_by_name(
    family: str, field: str, number: int, checkpoint: Callable[..., Path], opened: list[CountingFiles]
) -> None:
    assert_names(load(checkpoint(family, **{field: number})), field)
    assert all(files.entries.num_lookups <= len(files.entries) + 1 for files in opened)


@ON_EVERY_FAMILY
@WITH_ABSURD_NUMBERS
@pytest.mark.parametrize("field", UNBACKED)
def test_a_number_that_no_tensor_backs_is_refused_by_name_or_costs_nothing(
    family: str, field: str, number: int, checkpoint: Callable[..., Path]
) -> None:
    assert_bounded_or_named(load(checkpoint(family, **{field: number})), field)


@WITH_ABSURD_NUMBERS
@pytest.mark.parametrize("field", IN_THE_ROPE)
def test_so_is_one_of_the_rotary_embedding(field: str, number: int, checkpoint: Callable[..., Path]) -> None:
    rope = {**make_config("llama")["rope_scaling"], field: number}  # type: ignore[dict-item]
    assert_bounded_or_named(load(checkpoint("llama", rope_scaling=rope)), field)


@pytest.mark.parametrize("num_layers", [4, 4096])
def test_the_check_of_the_tensors_ends_at_the_first_that_is_missing(
    num_layers: int, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint("llama", num_hidden_layers=num_layers)
    config, files = read_config(folder), CountingFiles(folder)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=rf"layers\.3\..* missing.*num_hidden_layers {num_layers}$"):
        check_tensors(config, files)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert files.entries.num_lookups < len(files.entries)
    assert peak < 1 << 18


@pytest.mark.parametrize("number", [MAX_POSITIONS + 1, 2**31 - 1, 2**31])
def test_more_positions_than_any_model_has_are_refused(number: int) -> None:
    values = make_config("llama", max_position_embeddings=number)
    with pytest.raises(
        CheckpointError, match=f"max_position_embeddings must be between 1 and {MAX_POSITIONS}"
    ):
        parse_config(Fields("config.json", values))


def test_as_many_positions_as_are_allowed_need_no_memory_of_their_own(
    checkpoint: Callable[..., Path],
) -> None:
    model = load(checkpoint("llama", max_position_embeddings=MAX_POSITIONS))
    assert isinstance(model, LoadedModel)
    assert_bounded(model)


@pytest.mark.parametrize("window", [2**31, 2**32 + 16])
def test_a_window_that_32_bits_do_not_hold_is_refused(window: int) -> None:
    with pytest.raises(CheckpointError, match="sliding_window must be between 1 and 2147483647"):
        parse_config(Fields("config.json", make_config("mistral", sliding_window=window)))


@pytest.mark.parametrize("sizes", [{"head_dim": 7}, {"head_dim": None, "num_attention_heads": 64}])
def test_an_odd_head_dim_is_refused(sizes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"head_dim .* is (7|1), .* even"):
        parse_config(Fields("config.json", make_config("llama", **sizes)))


@pytest.mark.parametrize("field", ["low_freq_factor", "high_freq_factor"])
def test_a_factor_that_would_be_divided_by_is_not_0(field: str) -> None:
    rope = {**make_config("llama")["rope_scaling"], field: 0}  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=f"{field} must be greater than 0"):
        parse_config(Fields("config.json", make_config("llama", rope_scaling=rope)))
