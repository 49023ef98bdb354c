"""Percentiles, summaries, tables, and what a token costs."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lab.bench.planning import measure_planning
from lab.bench.routing import measure_routing
from penstock.app.bench.arithmetic import Arithmetic, arithmetic_of, num_weights
from penstock.app.bench.checkpoint import (
    HALF_B,
    LLAMA_135M,
    LLAMA_TINY,
    Shape,
    cache_folder,
    config_of,
    ensure_checkpoint,
    ensure_folder,
    letter_token_ids,
)
from penstock.app.bench.statistics import percentile, rate_until, summarise
from penstock.app.bench.workloads import WORKLOADS, Interactive, Workload
from penstock.app.reader import Answer
from penstock.app.tables import number, percent, table
from penstock.engine.model.parse import read_config
from penstock.engine.spec import Experts
from tests.engine.families import SPARSE, TINY


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_the_fiftieth_percentile_is_the_median(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values), abs=1e-6)


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(percentile([], 50))


def answer(started_s: float, *times_s: float, error: str | None = None) -> Answer:
    return Answer(started_s, times_s[-1], list(times_s), 10, 5, 2 * len(times_s), error)


def test_a_summary_counts_whole_answers_over_all_of_the_time() -> None:
    figures = summarise([answer(0.0, 1.0, 1.1, 1.4), answer(0.5, 1.0, 2.0), answer(0.0, 4.0, error="x")], 3)
    assert (figures.requests, figures.failed, figures.first_error) == (3, 1, "x")
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (20, 10, 10)
    assert figures.duration_s == 4.0
    assert figures.tokens_per_s == 2.5
    assert figures.tokens_per_frame == 2.0
    assert figures.ttft_p50_ms == pytest.approx(750)
    assert figures.itl_p50_ms == pytest.approx(300)


def test_a_rate_until_a_time_counts_the_tokens_that_came_by_then() -> None:
    # Of the first answer 2 of 3 frames in time, of the second none, the third failed.
    answers = [answer(0.0, 1.0, 1.5, 3.0), answer(2.0, 4.0, 5.0), answer(0.0, 1.0, error="x")]
    assert rate_until(answers, 2.0) == pytest.approx(4 / 2.0)


def test_refused_requests_are_counted_among_the_failed_ones() -> None:
    refused = [Answer(0.0, 1.0, error="busy", status=status) for status in (429, 503, 500)]
    figures = summarise([answer(0.0, 1.0), *refused], 1)
    assert (figures.failed, figures.refused) == (3, 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "-"), (0.12345, "0.123"), (19.04, "19"), (1234.5, "1,234"), (99.96, "100"), (None, "-")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0%"),
        (0.004, "0.4%"),
        (0.1, "10.0%"),
        (0.5, "50%"),
        (0.9, "90.0%"),
        (0.996, "99.6%"),
        (1.0, "100%"),
        (1.5, "150.0%"),
    ],
)
def test_percents_have_tenths_where_a_percent_decides(value: float | None, text: str) -> None:
    assert percent(value) == text


def test_a_table_lines_up() -> None:
    assert table(["name", "n"], [["a", "1"], ["longer", "100"]]) == (
        "name      n\n------  ---\na         1\nlonger  100"
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}


def test_the_shapes_are_those_of_the_published_figures() -> None:
    assert config_of(LLAMA_135M) == CONFIG
    assert Shape("half-b", 896, 24, 14, 2, 4864, 32768, 2048) == HALF_B


@pytest.mark.parametrize(
    ("left_out", "body", "kv"),
    [
        ([], 212_336_640, 11_520),
        (["head_dim"], 212_336_640, 11_520),
        (["num_key_value_heads"], 238_878_720, 34_560),
        (["head_dim", "num_key_value_heads"], 238_878_720, 34_560),
    ],
)
def test_the_arithmetic_of_a_token(tmp_path: Path, left_out: list[str], body: int, kv: int) -> None:
    config = {name: value for name, value in CONFIG.items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arithmetic = arithmetic_of(read_config(tmp_path))
    assert arithmetic == Arithmetic(body=body, head=18_874_368, vocabulary=16_384, kv=kv)
    assert arithmetic.per_output_token == body + 18_874_368
    assert arithmetic.total(2, 1) == 3 * body + 18_874_368


def test_a_token_goes_through_the_experts_that_it_chooses(tmp_path: Path) -> None:
    config = read_config(SPARSE["Qwen 3 MoE"].make(tmp_path))
    expected = 0
    for layer in config.layers:
        part, hidden = layer.feed_forward, config.hidden_size
        expected += hidden * (2 * config.q_size + 2 * config.kv_size)
        if isinstance(part, Experts):
            assert part.router.top_k < part.router.num_experts
            expected += hidden * (part.router.num_experts + part.router.top_k * 3 * part.inner_size)
        elif part is not None:
            expected += 3 * hidden * part.inner_size
    assert arithmetic_of(config).body == 2 * expected
    stored = load_file(next(tmp_path.glob("*.safetensors"))).values()
    assert num_weights(config) == sum(tensor.numel() for tensor in stored if tensor.dim() > 1)


def test_layers_that_share_keys_and_values_leave_none_of_their_own(tmp_path: Path) -> None:
    config = read_config(TINY["Gemma 4 E"].make(tmp_path))
    own = [attention for attention in config.attentions if attention.shares is None]
    assert 0 < len(own) < len(config.attentions)
    assert arithmetic_of(config).kv == sum(2 * attention.kv_size for attention in own)


def test_the_workloads_are_those_of_the_published_figures() -> None:
    shapes = {
        w.name: (w.streams, w.shared_tokens + w.prompt_tokens, w.output_tokens) for w in WORKLOADS.values()
    }
    assert [w.rounds for w in WORKLOADS.values()] == [3, 1, 1, 200, 1]
    assert WORKLOADS["W3"].shared_tokens == 512
    assert shapes == {
        "W1": (1, 128, 128),
        "W2": (16, 256, 128),
        "W3": (16, 544, 64),
        "W4": (8, 512, 128),
        "W5": (64, 128, 64),
    }
    assert WORKLOADS["W4"].seconds == 45
    assert WORKLOADS["W4"].interactive == Interactive(every_s=1, prompt_tokens=64, output_tokens=32)


def test_interactive_requests_come_one_by_one_with_prompts_of_their_own() -> None:
    workload = Workload(
        name="",
        streams=1,
        prompt_tokens=4,
        output_tokens=5,
        seconds=3,
        interactive=Interactive(every_s=0.5, prompt_tokens=6, output_tokens=7),
    )
    assert workload.interactive_starts_s() == [0, 0.5, 1, 1.5, 2, 2.5]
    bodies = workload.interactive_bodies("m", range(1000), seed=1)
    assert [len(stream) for stream in bodies] == [1] * 6
    assert len({str(body["prompt"]) for (body,) in bodies}) == 6
    assert {(body["max_tokens"], body["service_tier"]) for (body,) in bodies} == {(7, "priority")}
    assert WORKLOADS["W2"].interactive_bodies("m", range(1000), seed=1) == []


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    workload = Workload(name="", streams=3, prompt_tokens=4, shared_tokens=6, output_tokens=5, rounds=2)
    bodies = workload.bodies("m", range(1000), seed=1)
    prompts = [body["prompt"] for stream in bodies for body in stream]
    assert [len(stream) for stream in bodies] == [2, 2, 2]
    assert len({str(prompt) for prompt in prompts}) == 6
    assert len({str(prompt[:6]) for prompt in prompts if isinstance(prompt, list)}) == 1
    assert bodies == workload.bodies("m", range(1000), seed=1)
    assert bodies != workload.bodies("m", range(1000), seed=2)
    assert bodies[0][0]["max_tokens"] == 5


def test_planning_can_be_measured() -> None:
    figures = measure_planning(num_sequences=8, num_steps=4)
    assert 0 < figures["host_p50_ms"] <= figures["host_p99_ms"]


def test_choices_among_replicas_can_be_measured() -> None:
    figures = measure_routing(
        num_replicas=5, num_sessions=100, num_held=300, num_blocks=20_000, num_kept=2_000
    )
    assert 0 < figures["choice_p50_us"] <= figures["choice_p99_us"]
    assert figures["decisions"] >= 100
    assert 0.1 < figures["hit_rate"] < 1
    assert figures["blocks"] <= 5 * 300
    assert 60 < figures["block_bytes"] < 400
    assert 60 < figures["shared_block_bytes"] < 400
    assert figures["kept_blocks"] == 50 * 32 + 2_000 * 12
    assert 60 < figures["kept_bytes"] / figures["kept_blocks"] < 400


def test_a_folder_is_written_once_and_a_half_written_one_goes(tmp_path: Path) -> None:
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("whole")

    def fail(folder: Path) -> None:
        write(folder)
        raise ValueError(folder.name)

    with pytest.raises(ValueError, match="partial"):
        ensure_folder("name", fail, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert (ensure_folder("name", write, tmp_path) / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert len(calls) == 2


def test_a_folder_that_another_process_wrote_meanwhile_is_replaced(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "file").write_text("own")
        (tmp_path / "name").mkdir()
        (tmp_path / "name" / "file").write_text("other")

    assert (ensure_folder("name", write, tmp_path) / "file").read_text() == "own"


def test_checkpoints_lie_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock" / "bench"
    assert ensure_folder("name", lambda _: None) == tmp_path / "penstock" / "bench" / "name"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "penstock" / "bench"


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    folder = ensure_checkpoint(LLAMA_TINY, tmp_path)

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text())

    assert read("config.json") == config_of(LLAMA_TINY)
    assert read("generation_config.json") == {"bos_token_id": 256, "eos_token_id": 257}
    assert read("tokenizer_config.json")["model_max_length"] == 2048
    assert [read("tokenizer_config.json")[f"{name}_token"] for name in ("bos", "eos")] == ["<s>", "</s>"]
    tokenizer = read("tokenizer.json")
    assert [(token["id"], token["special"]) for token in tokenizer["added_tokens"]] == [
        (256, True),
        (257, True),
    ]
    assert tokenizer["pre_tokenizer"]["add_prefix_space"] is False
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(1024))
    merges = ["".join(merge) for merge in tokenizer["model"]["merges"]]
    assert [len(merges), *merges[:2], *merges[675:677], merges[-1]] == [766, "aa", "ab", "zz", "aaa", "adl"]
    weights = load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SIZES
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    embedding = weights["model.embed_tokens.weight"].float()
    assert embedding[:258].abs().max() == 0
    assert all(row.abs().max() > 0 for row in embedding[258:])
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert weight.eq(1).all()
        elif name != "model.embed_tokens.weight":
            assert weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    again = load_file(ensure_checkpoint(LLAMA_TINY, tmp_path / "again") / "model.safetensors")
    assert all(again[name].equal(weight) for name, weight in weights.items())


SIZES = {"model.embed_tokens.weight": (1024, 64), "model.norm.weight": (64,)} | {
    f"model.layers.{layer}.{name}.weight": size
    for layer in (0, 1)
    for name, size in {
        "input_layernorm": (64,),
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "post_attention_layernorm": (64,),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }.items()
}


def test_the_checkpoint_is_one_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_checkpoint(LLAMA_TINY, tmp_path)
    assert ensure_checkpoint(LLAMA_TINY, tmp_path) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == LLAMA_TINY.vocabulary
    assert tokenizer.decode(tokenizer.encode("héllo world")) == "héllo world"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([[300, 301]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert all(token in letter_token_ids(LLAMA_TINY) for token in output[0].tolist())
