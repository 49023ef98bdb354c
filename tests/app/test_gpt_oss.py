"""A model of gpt-oss behind a real server: what it writes in harmony's format comes as reasoning, text and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.responses import ResponseCompletedEvent, ResponseFunctionToolCall, ResponseReasoningItem
from safetensors.torch import load_file, save_file

from loadtests.forked import ForkedServer
from tests.engine.checkpoints import byte_level_tokenizer, write_tokenizer
from tests.engine.families import SPARSE

TEMPLATE = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{# <|channel|>analysis <|channel|>commentary <|channel|>final<|message|><|return|> #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
PIECES = [
    *("assistant", "<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>"),
    *("assis", "tant", "<|channel|>comment", "ary<|message|>", "I", " look.", "<|end|><|start|>"),
    *("assistant<|channel|>", "commentary", " to=functions", ".clock", " <|constrain|>json<|message|>"),
    *('{"zone"', ': "UT', 'C"}', "<|call|>"),
]
"""What the model writes, from the end of any prompt on; each is a token, and no two are the same."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, but that its output head finds the next of PIECES by the embedding of the last."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    tokenizer = type(byte_level_tokenizer()).from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.add_tokens([piece for piece in PIECES if piece not in MARKERS])
    ends = [tokenizer.token_to_id(name) for name in ("<|return|>", "<|call|>")]
    SPARSE["gpt-oss"].make(folder, vocab_size=tokenizer.get_vocab_size(), eos_token_id=ends[0])
    write_tokenizer(folder, tokenizer, chat_template=TEMPLATE, eos_token="<|return|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensor *= 0.002 if "o_proj" in name or "down_proj" in name else 1
    embedding, head = tensors["model.embed_tokens.weight"], torch.zeros_like(tensors["lm_head.weight"])
    for last, following in pairwise(map(tokenizer.token_to_id, PIECES)):
        head[following] = embedding[last] / embedding[last].norm()
    tensors |= {"lm_head.weight": head, "model.norm.weight": torch.ones(embedding.shape[1])}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[openai.OpenAI]:
    with ForkedServer(["--model", str(folder), "--served-model-name", "gpt-oss"]) as server:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            yield api


def test_a_chat_has_reasoning_text_and_a_call(api: openai.OpenAI) -> None:
    chunks = api.chat.completions.create(
        model="gpt-oss",
        messages=[{"role": "user", "content": "Hi"}],
        tools=[TOOL],
        temperature=0,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [choice.delta for choice in choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    begun, *more = [call.function for delta in deltas for call in delta.tool_calls or () if call.function]
    assert begun.name == "clock"
    assert json.loads("".join(part.arguments or "" for part in more)) == {"zone": "UTC"}
    assert choices[-1].finish_reason == "tool_calls"


def test_a_response_has_its_items(api: openai.OpenAI) -> None:
    function: Any = {"type": "function", **TOOL["function"]}
    events = api.responses.create(model="gpt-oss", input="Hi", tools=[function], temperature=0, stream=True)
    *_, last = events
    assert isinstance(last, ResponseCompletedEvent)
    reasoning, message, call = last.response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm."
    assert message.type == "message"
    assert last.response.output_text == "I look."
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("clock", {"zone": "UTC"})
