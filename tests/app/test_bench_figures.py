"""Percentiles, summaries, tables, and what a token costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lab.bench.checkpoints import A3B_30B
from penstock.app.bench.arithmetic import Arithmetic, arithmetic_of, num_weights
from penstock.app.bench.checkpoint import (
    LLAMA_TINY,
    config_of,
    ensure_checkpoint,
    ensure_folder,
    text_token_ids,
    write_checkpoint,
)
from penstock.app.bench.statistics import percentile, rate_until, summarise
from penstock.app.bench.workloads import WORKLOADS, Interactive, Workload
from penstock.app.reader import TimedAnswer
from penstock.app.tables import number, percent, table
from penstock.engine.model.parse import read_config
from penstock.engine.spec import Experts
from tests.engine.families import TINY


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(percentile([], 50))


def answer(started_s: float, *times_s: float, error: str | None = None) -> TimedAnswer:
    return TimedAnswer(started_s, times_s[-1], list(times_s), 10, 5, 2 * len(times_s), error)


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
    refused = [TimedAnswer(0.0, 1.0, error="busy", status=status) for status in (429, 503, 500)]
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
    cut = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    write_checkpoint({**A3B_30B, **cut, "moe_intermediate_size": 32}, tmp_path)
    config = read_config(tmp_path)
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


def test_the_checkpoint_is_one_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_checkpoint(LLAMA_TINY, tmp_path)
    assert ensure_checkpoint(LLAMA_TINY, tmp_path) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == LLAMA_TINY.vocabulary
    assert tokenizer.decode(tokenizer.encode("héllo world")) == "héllo world"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([[300, 301]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert all(token in text_token_ids(config_of(LLAMA_TINY)) for token in output[0].tolist())
