"""The names of the parsers that settings can choose, all of them known to `gateway.wire.reading`."""

from __future__ import annotations

from typing import Literal

ToolParser = Literal[
    "auto",
    "none",
    "cohere2",
    "functionary",
    "functools",
    "gemma4",
    "glm4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "hunyuan",
    "hunyuan_dense",
    "lfm2",
    "llama3_json",
    "llama4_json",
    "llama_pythonic",
    "minicpm5",
    "minimax_m2",
    "mistral",
    "mistral_args",
    "nemotron",
    "olmo3",
    "phi4_mini",
    "qwen3_coder",
    "seed_oss",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "cohere2",
    "cohere2_text",
    "gemma4",
    "granite_words",
    "harmony",
    "minimax_m2",
    "mistral",
    "seed_oss",
    "think",
    "think_answer",
    "think_response",
]
