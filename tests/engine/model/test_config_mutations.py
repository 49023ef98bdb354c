"""config.json with entries changed at random: a ModelConfig that is whole, or one line that names what is wrong."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.model.parse import parse_config, read_config, read_generation_defaults
from penstock.engine.spec import Rope
from tests.engine.checkpoints import FAMILIES, make_config
from tests.few import examples

WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
FLAGS = ("tie_word_embeddings",)
TEXTS = ("hidden_act", "dtype")
ENTRIES = (*WHOLE_NUMBERS, *NUMBERS, *FLAGS, *TEXTS)

scalars = st.booleans() | st.integers(-5, 200) | st.floats(-1e3, 1e3) | st.text(max_size=6)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


def parse(family: str, **changes: object) -> ModelConfig:
    """Entries are set, to None as well."""
    return parse_config(Fields("config.json", {**make_config(family), **changes}))


def fits(entry: str, value: object) -> bool:
    """Whether JSON of this kind is what the entry takes."""
    if isinstance(value, bool):
        return entry in FLAGS
    if isinstance(value, int):
        return entry in WHOLE_NUMBERS or entry in NUMBERS
    if isinstance(value, float):
        return entry in NUMBERS or (entry in WHOLE_NUMBERS and value.is_integer())
    return isinstance(value, str) and entry in TEXTS


def assert_whole(config: ModelConfig) -> None:
    kinds = {"int": int, "float": float, "bool": bool, "str": str, "tuple[int, ...]": tuple}
    for part in (config, config.spec, config.spec.ropes[0]):
        for field in fields(part):
            value = getattr(part, field.name)
            kind = str(field.type)
            if kind in kinds:
                assert type(value) is kinds[kind], field.name
    assert isinstance(config.spec.ropes[0], Rope)
    assert config.num_heads % config.num_kv_heads == 0
    assert config.q_size == config.num_heads * config.head_dim
    assert config.dtype in ("float32", "bfloat16", "float16")


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(FAMILIES), st.sampled_from(ENTRIES), values)
def test_an_entry_of_the_wrong_kind_is_named(family: str, entry: str, value: object) -> None:
    if fits(entry, value):
        return
    with pytest.raises(CheckpointError) as caught:
        parse(family, **{entry: value})
    message = str(caught.value)
    assert message.startswith("config.json")
    assert entry in message
    assert "\n" not in message
    assert len(message) < 300


@settings(max_examples=examples(120), deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.dictionaries(st.sampled_from(ENTRIES), values | st.none(), max_size=4),
)
def test_any_mixture_of_changes_is_a_whole_config_or_an_error_that_names_one(
    family: str, changes: dict[str, Any]
) -> None:
    try:
        config = parse(family, **changes)
    except CheckpointError as error:
        named = [*changes, "heads"]
        assert any(name in str(error) for name in named)  # noqa: PT017
    else:
        assert_whole(config)


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(-3, 12), st.integers(-3, 12))
def test_heads_are_shared_evenly_or_not_at_all(family: str, heads: int, kv_heads: int) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    if heads > 0 and kv_heads > 0 and heads % kv_heads == 0:
        config = parse(family, **changes)
        assert (config.num_heads, config.num_kv_heads) == (heads, kv_heads)
        return
    sized = heads > 0 and kv_heads > 0
    message = f"{heads} heads cannot share {kv_heads} key-value heads" if sized else "between 1 and"
    with pytest.raises(CheckpointError, match=message):
        parse(family, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "entry",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
@pytest.mark.parametrize("how", ["left out", "null"])
def test_what_has_no_default_is_said_to_be_missing(family: str, entry: str, how: str) -> None:
    config = make_config(family)
    if how == "null":
        config[entry] = None
    else:
        del config[entry]
    with pytest.raises(CheckpointError, match=rf"^config\.json: {entry} is missing$"):
        parse_config(Fields("config.json", config))


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(FAMILIES), st.dictionaries(st.text(max_size=12), values, max_size=4))
def test_entries_that_nobody_knows_change_nothing(family: str, extra: dict[str, Any]) -> None:
    known = make_config(family)
    extra = {f"x_{name}": value for name, value in extra.items()}
    assert parse(family, **extra) == parse_config(Fields("config.json", known))


@settings(max_examples=examples(50), deadline=None)
@given(
    st.sampled_from(["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    values.filter(lambda value: isinstance(value, str | list | dict | bool)),
    st.sampled_from(["rope_scaling", "rope_parameters"]),
)
def test_a_wrong_entry_of_the_rope_is_named_with_its_place(entry: str, value: object, place: str) -> None:
    rope: dict[str, object] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        entry: value,
    }
    changes = {"rope_scaling": None, "rope_parameters": None, place: rope}
    with pytest.raises(CheckpointError, match=rf"^config\.json: {place}: {entry} must be"):
        parse("llama", **changes)


def test_whole_numbers_may_be_written_with_a_point() -> None:
    config = parse("llama", **{entry: float(str(make_config("llama")[entry])) for entry in WHOLE_NUMBERS})
    assert config == parse("llama")
    assert_whole(config)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 8), st.integers(0, 9), st.integers(1, 64), st.booleans())
def test_every_layer_has_a_window(layers: int, first: int, window: int, wanted: bool) -> None:
    config = parse(
        "qwen2",
        num_hidden_layers=layers,
        use_sliding_window=wanted,
        sliding_window=window,
        max_window_layers=first,
    )
    windows = [attention.window for attention in config.attentions]
    assert windows == [window if wanted and i >= first else 0 for i in range(layers)]
    mistral = parse("mistral", num_hidden_layers=layers, sliding_window=window)
    assert [attention.window for attention in mistral.attentions] == [window] * layers


# Files


def write(folder: Path, config: bytes, generation: bytes | None = None) -> Path:
    (folder / "config.json").write_bytes(config)
    if generation is not None:
        (folder / "generation_config.json").write_bytes(generation)
    return folder


@settings(max_examples=examples(70), deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_changed_bytes_of_the_file_are_a_config_or_an_error_of_one_line(
    family: str, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(json.dumps({**make_config(family), "num_hidden_layers": 2}).encode())
    for place, byte in changes:
        content[place % len(content)] = byte
    with TemporaryDirectory() as folder:
        try:
            config = read_config(write(Path(folder), bytes(content)))
        except CheckpointError as error:
            assert "config.json" in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert_whole(config)


GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@settings(max_examples=examples(70), deadline=None)
@given(st.dictionaries(st.sampled_from(GENERATION), values | st.none(), max_size=3))
def test_generation_defaults_are_numbers_or_an_error_that_names_one(changes: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), b"{}", json.dumps(changes).encode())
        try:
            defaults = read_generation_defaults(Path(folder))
        except CheckpointError as error:
            assert any(f"generation_config.json: {name} must be" in str(error) for name in changes)  # noqa: PT017
            return
    for name in GENERATION:
        value = getattr(defaults, name)
        assert value == changes.get(name)
        assert not isinstance(value, bool)


@settings(max_examples=examples(50), deadline=None)
@given(st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9)))
def test_every_end_of_sequence_of_either_file_is_known_once(own: object, more: list[int]) -> None:
    config = json.dumps({**make_config("llama"), "eos_token_id": own}).encode()
    with TemporaryDirectory() as folder:
        found = read_config(
            write(Path(folder), config, json.dumps({"eos_token_id": more}).encode())
        ).eos_token_ids
    first = own if isinstance(own, list) else [] if own is None else [own]
    assert set(found) == {*first, *more}
    assert len(found) == len(set(found))
