"""What only Gemma 4 has: published checkpoints' entries, shared keys and values, a table of embeddings for layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loader import load_model
from penstock.engine.fields import Fields
from penstock.engine.kernels.cpu.native import NativeLinear
from penstock.engine.model.parse import parse_config
from penstock.engine.program.native import NativeDecoder
from tests.engine.families import TINY
from tests.engine.model.test_transformer import load, logits_of, make_batch

TOKEN_IDS = [7 * i % 390 + 3 for i in range(60)]


def entries_of(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return entries


def parse(entries: dict[str, Any], **changes: object) -> ModelConfig:
    return parse_config(Fields("config.json", {**entries, **changes}))


def test_published_checkpoints_say_once_what_transformers_says_of_each_layer(tmp_path: Path) -> None:
    entries = entries_of(TINY["Gemma 4"].make(tmp_path))
    assert entries.pop("per_layer_config") == {"2": {"head_dim": 40, "num_key_value_heads": 1}}
    published = parse(entries, global_head_dim=40, num_global_key_value_heads=1)
    assert published == parse(entries_of(tmp_path))
    wide = parse(entries, global_head_dim=40, num_global_key_value_heads=1, attention_k_eq_v=False)
    assert [attention.num_kv_heads for attention in wide.attentions] == [2, 2, 2]
    assert [attention.head_dim for attention in parse(entries).attentions] == [24, 24, 512]


def test_the_last_layers_read_what_the_last_of_their_kind_before_them_wrote(tmp_path: Path) -> None:
    config = parse(entries_of(TINY["Gemma 4 E"].make(tmp_path)))
    assert [attention.shares for attention in config.attentions] == [None, None, None, 1, 1, 2]
    parts = [layer.feed_forward for layer in config.layers]
    assert [part.inner_size for part in parts if part] == [112, 112, 112, 224, 224, 224]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        ({"num_kv_shared_layers": 4}, "no layer with full_attention and keys and values of its own"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 500}, "some of the 512 tokens have no embedding for each layer"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "4 heads cannot share 3"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    entries = entries_of(TINY["Gemma 4 E"].make(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        parse(entries, **changes)


def test_rows_that_are_not_sampled_go_no_further_than_the_last_keys(tmp_path: Path) -> None:
    """The rows that are sampled have the same bits; several neighbours of one sequence, and one of another."""
    model = load(TINY["Gemma 4 E"].make(tmp_path), "native")
    batch = make_batch([(TOKEN_IDS, 0), (TOKEN_IDS[20:], 0)])
    whole = logits_of(model, batch)
    rows = torch.tensor([3, 57, 58, 59, 99], dtype=torch.int32)
    assert torch.equal(logits_of(model, replace(batch, sample_rows=rows)), whole[rows])


def test_the_table_keeps_the_type_of_the_file_and_small_maps_are_not_quantized(tmp_path: Path) -> None:
    folder = TINY["Gemma 4 E"].make(tmp_path, intermediate_size=128)
    options = LoadOptions(device="cpu", dtype="bfloat16", num_blocks=64, num_threads=2, quantize="int8")
    model = load_model(folder, replace(options, kv_dtype="int8"), lambda _: None, lambda *_: None)
    assert logits_of(model, make_batch([(TOKEN_IDS, 0)])).isfinite().all()
    decoder = model.decoder
    assert isinstance(decoder, NativeDecoder)
    (combine,) = (op for op in decoder.program.ops if op.kind == "combine")
    assert isinstance(combine.rows, torch.Tensor)
    assert combine.rows.dtype == torch.float32
    (out,) = (op.linear for op in decoder.program.ops if op.part == 0)
    assert isinstance(out, NativeLinear)
    assert out.activation_dtype != torch.int8
