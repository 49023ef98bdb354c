"""Chat templates as they are published: rendered as transformers does, their formats known, their calls read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.engine.text.tokenizer import Tokenizer
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.parsing import answer_of
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.reading import Formats
from penstock.gateway.wire.tools.use import tool_use
from tests.gateway.harness import tokenizer_json

WORLD = Path(__file__).parents[3].parent / "shared" / "world"
pytestmark = pytest.mark.skipif(not WORLD.is_dir(), reason="no published templates lie beside the repository")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
    }
]
ARGUMENTS = {"city": "Köln", "days": 2}
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
USER, CALLS = (
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
)
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"temp": 21}'}
TALKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]] = {
    "system": (
        [{"role": "system", "content": "Be brief & kind."}, {**USER, "content": "<b>1 < 2</b>?\n"}],
        {},
        [],
    ),
    "no system": ([USER, {"role": "assistant", "content": "Hi."}, USER], {}, []),
    "tools": ([{"role": "system", "content": "Use tools."}, USER, CALLS, RESULT, USER], {}, TOOLS),
    "tool result last": ([USER, CALLS, RESULT], {}, TOOLS),
    "reasoning": (
        [USER, {"role": "assistant", "reasoning_content": "I think so.", "content": "Yes."}, USER],
        {"enable_thinking": True, "thinking": True},
        [],
    ),
    "no thinking": ([USER], {"enable_thinking": False, "thinking": False}, []),
}
ADAPTED = {"google-gemma-4-31B-it-interleaved", "zai-org--GLM-4-9B-0414"}
"""Results of tools go to these under another name; see docs/guide/tools.md."""
FORMATS = {
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere2", "cohere2"),
    "GLM-4.6": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "LFM2.5-Instruct": ("lfm2", "think"),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think_response"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meetkai-functionary-medium-v3.1": ("functionary", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_args", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
    "tencent--Hunyuan-0.5B-Pretrain": ("hunyuan_dense", "think_answer"),
    "zai-org--GLM-4-9B-0414": ("glm4", None),
    "zai-org--GLM-4.5": ("glm45", "think"),
}
"""Of calls and reasoning, as the makers of the models name them."""


@cache
def published() -> dict[str, Tokenizer]:
    """Each template with the words of special tokens, in a tokenizer that has no other special ones."""
    return {name: Tokenizer(tokenizer_json(), SPECIAL, source) for name, source in sources()}


@cache
def prompts_of(name: str) -> Prompts:
    """A template is compiled, and tried with short talks, once."""
    return Prompts(published()[name])


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted((WORLD / "templates").glob("*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")
    for folder in sorted((WORLD / "configs").iterdir()):
        if (folder / "chat_template.jinja").is_file():
            yield folder.name, (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif (folder / "tokenizer_config.json").is_file():
            told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            if isinstance(told.get("chat_template"), str):
                yield folder.name, told["chat_template"]


def expected(source: str, talk: str) -> str | None:
    """What transformers makes of it; None if it refuses."""
    messages, variables, tools = TALKS[talk]
    fields = {"chat_template": source, "add_generation_prompt": True, **variables, **SPECIAL}
    try:
        return str(render_jinja_template([messages], tools=tools or None, **fields)[0][0])
    except Exception:  # a template raises what it likes
        return None


@pytest.mark.parametrize("talk", TALKS)
def test_a_conversation_is_rendered_as_transformers_renders_it(talk: str) -> None:
    messages, variables, tools = TALKS[talk]
    for name, tokenizer in published().items():
        assert tokenizer.chat_template is not None
        wanted = expected(tokenizer.chat_template, talk)
        try:
            prompt = prompts_of(name).chat(messages, tools=tools, variables=variables)
        except ApiError as error:
            if wanted is not None and error.code != "tools_not_supported":
                pytest.fail(f"{name}: {error}")
            continue
        text = tokenizer.decode(prompt, skip_special=False)
        if wanted is None:  # mended, see `gateway.wire.conversation`
            assert all(message["content"].strip() in text for message in messages), name
        else:
            assert text == wanted or (name in ADAPTED and tools), name


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_tells_its_formats(name: str) -> None:
    formats = Formats(published()[name])
    assert (formats.tools, formats.reasoning) == FORMATS[name]


def test_a_call_is_read_as_its_template_writes_it() -> None:
    num_read = 0
    for name, tokenizer in published().items():
        formats, prompts = Formats(tokenizer), Prompts(tokenizer)
        if formats.tools is None:
            continue
        try:
            prompt = prompts.chat([USER], tools=TOOLS)
            whole = prompts.chat([USER, CALLS], tools=TOOLS, add_generation_prompt=False)
        except ApiError:
            continue
        asked, told = (tokenizer.decode(ids, skip_special=False) for ids in (prompt, whole))
        start = reply_start(asked, told)
        reply, prompt = told[start:], tokenizer.encode(told[:start])
        if "get_weather" not in reply:
            continue
        num_read += 1
        calls = answer_of(formats.reading(prompt, tool_use(TOOLS)).parser("a"), reply).calls
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", ARGUMENTS)], (
            name
        )
    assert num_read > 30


def reply_start(asked: str, told: str) -> int:
    """Where a conversation goes on behind what both have, which ends with no part of a marker."""
    pairs = enumerate(zip(asked, told, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(asked), len(told)))
    begun = told.rfind("<", 0, same)
    return begun if begun >= 0 and ">" not in told[begun:same] else same
