"""The server with its real model under programs that measure models: too heavy for every run of the tests.

pip install 'penstock[harnesses]'
pytest tests/gateway/test_harnesses.py

vLLM pins many of its requirements, so `pip install --no-deps vllm` goes into an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.app.checkpoint import DEMO_MODEL

MODEL = "penstock-demo"
TIMEOUT_S = 300


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


def run(*command: str, folder: Path) -> None:
    """A program that never asks anything of the network but the server."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs("lm_eval")
def test_lm_eval_asks_for_likelihoods_and_for_answers(live_server: str, tmp_path: Path) -> None:
    questions = [
        {"q": "What is the capital of France?", "choices": ["Paris", "Rome"], "gold": 0},
        {"q": "What is the capital of Italy?", "choices": ["Paris", "Rome"], "gold": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(line) for line in questions))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}}
    chosen = common | {
        "task": "chosen",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}} The capital is",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    told = common | {
        "task": "told",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (chosen, told):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))  # which is YAML, too
    server = f"model={MODEL},base_url={live_server}/v1/completions,tokenizer={DEMO_MODEL},num_concurrent=2"
    run(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", server, "--tasks", "chosen,told"),
        *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
        folder=tmp_path,
    )
    (report,) = (tmp_path / "out").rglob("results*.json")
    results: dict[str, Any] = json.loads(report.read_text())["results"]
    assert 0 <= results["chosen"]["acc,none"] <= 1
    assert "exact_match,none" in results["told"]


@needs("guidellm")
@pytest.mark.parametrize("form", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures_what_it_made_up(live_server: str, form: str, tmp_path: Path) -> None:
    run(
        *("guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={live_server},model={MODEL},request_format={form}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        folder=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


VLLM_FORMS = {
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
    "openai-embeddings": "/v1/embeddings",
}


@needs("vllm")
@pytest.mark.parametrize("backend", VLLM_FORMS)
def test_vllms_bench_finds_every_token(live_server: str, backend: str, tmp_path: Path) -> None:
    run(
        *("vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend, "--base-url", live_server),
        *("--endpoint", VLLM_FORMS[backend], "--model", MODEL, "--tokenizer", str(DEMO_MODEL)),
        *("--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "16"),
        *("--num-prompts", "4", *([] if backend == "openai-embeddings" else ["--ignore-eos"])),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(tmp_path), "--result-filename", "report.json"),
        folder=tmp_path,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["errors"]) == (4, [""] * 4)
    assert report["total_input_tokens"] >= 4 * 40
    if backend != "openai-embeddings":
        assert report["total_output_tokens"] == 4 * 16


@needs("litellm")
def test_litellm_speaks_every_dialect_of_the_server(live_server: str) -> None:
    import litellm

    asked: Any = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
    openai = {"api_base": f"{live_server}/v1", "api_key": "none"}
    places: list[dict[str, str]] = [
        {"model": f"openai/{MODEL}", **openai},
        {"model": f"hosted_vllm/{MODEL}", **openai},
        {"model": f"anthropic/{MODEL}", "api_base": live_server, "api_key": "none"},
        {"model": f"ollama_chat/{MODEL}", "api_base": live_server},
    ]
    texts = {litellm.completion(**place, **asked).choices[0].message.content for place in places}
    assert len(texts) == 1
    chunks = list(litellm.completion(**places[0], **asked, stream=True))
    assert {"".join(chunk.choices[0].delta.content or "" for chunk in chunks)} == texts
    embedded = litellm.embedding(f"openai/{MODEL}", input=["a", "b"], **openai)
    assert len(embedded.data) == 2
