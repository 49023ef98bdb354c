"""Published models are served as their weights say; tests/published.py brings them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lab import quality
from loadtests.forked import ForkedServer
from penstock.app.check import theirs
from penstock.app.check.compare import Distance
from penstock.app.offline.llm import LLM
from penstock.engine.model.checkpoint import read_tokenizer
from tests.engine.quant.storages.makers import WAYS
from tests.published import GEMMA, SMOLLM, published

pytestmark = [pytest.mark.long("published models"), pytest.mark.usefixtures("one_thread")]

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4, 5,"]
"""Nothing that comes after them is nearly as likely as something else."""


@pytest.fixture(scope="module", params=[SMOLLM, GEMMA])
def model(request: pytest.FixtureRequest) -> Path:
    return published(request.param)


@pytest.fixture(scope="module")
def exact(model: Path) -> Any:
    """The model in transformers, which dequantizes the file."""
    return theirs.load(model)


@pytest.fixture(scope="module")
def rounded(model: Path, exact: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The weights in bfloat16: as a checkpoint, and in transformers, where they are float32 again."""
    folder, network = tmp_path_factory.mktemp("rounded"), deepcopy(exact)
    for parameter in network.parameters():
        parameter.data = parameter.bfloat16().float()
    save(folder, model, network, {name: tensor.bfloat16() for name, tensor in network.state_dict().items()})
    return folder, network


def save(folder: Path, model: Path, network: Any, tensors: dict[str, Tensor], **entries: object) -> None:
    """Writes a checkpoint of a model's tensors, whose output head is the embedding."""
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = network.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(network).__name__], "dtype": "bfloat16", **entries}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(read_tokenizer(model)._parsing.to_str())


def distance(model: Path, network: Any) -> Distance:
    return quality.distance(
        {"model": str(model), "device": "cpu"}, partial(theirs.log_probabilities, network)
    )


def test_a_file_is_served_as_its_weights_say(model: Path, exact: Any) -> None:
    found = distance(model, exact)
    assert found.mean_kl < 0.008
    assert found.agreement > 0.9


def test_sixteen_bits_are_served_as_their_weights_say(rounded: tuple[Path, Any]) -> None:
    found = distance(*rounded)
    assert found.mean_kl < 0.002
    assert found.agreement > 0.97


@pytest.mark.parametrize("label", ["gptq-asym", "ct-w8a16", "bnb-int8"])
def test_what_another_library_stored_is_served_as_its_weights_say(
    label: str, model: Path, exact: Any, tmp_path: Path
) -> None:
    if model.name != SMOLLM:
        pytest.skip("one model is enough")
    network, stored = deepcopy(exact), dict[str, Tensor]()
    for name, parameter in network.named_parameters():
        if not name.endswith("_proj.weight"):
            stored[name] = parameter.data
            continue
        made = WAYS[label].make(parameter.data.clone())
        parameter.data = made.weight.float()
        stored |= {f"{name.removesuffix('.weight')}.{suffix}": each for suffix, each in made.tensors.items()}
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    save(tmp_path, model, network, stored, quantization_config=WAYS[label].config)
    assert distance(tmp_path, network).mean_kl < 0.002


def test_the_text_of_sixteen_bits_is_that_of_transformers(rounded: tuple[Path, Any]) -> None:
    folder, network = rounded
    with LLM(folder, device="cpu", progress=False) as llm:
        answers = llm.generate(PROMPTS, temperature=0, max_tokens=40, min_tokens=40)
    for answer in answers:
        prompt = torch.tensor([answer.prompt_token_ids])
        expected = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=40,
            max_new_tokens=40,
            pad_token_id=0,
        )
        assert answer.choices[0].token_ids == expected[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        ForkedServer(["--model", str(published(SMOLLM)), "--device", "cpu"]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_chat_by_openai_s_package(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    reply = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=30)
    said = reply.choices[0].message.content
    assert said is not None
    assert "Paris" in said
    assert reply.choices[0].finish_reason == "stop"
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And of Italy?"}]
    with client.chat.completions.create(
        model=model.id, messages=messages, temperature=0, max_tokens=40, stream=True
    ) as stream:
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Rome" in streamed
