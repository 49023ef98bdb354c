"""A body of Ollama's becomes that of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.errors import ApiError
from penstock.gateway.limits import Limits
from penstock.gateway.wire.conversation import thinking_switches
from penstock.gateway.wire.ollama.bodies import OllamaChatBody, ollama_chat_ask
from penstock.gateway.wire.strict import read

LIMITS = Limits()
HI = {"role": "user", "content": "Hi"}


def chat_of(**fields: object) -> Any:
    body = {"model": "m:latest", "messages": [HI], **fields}
    return ollama_chat_ask(read(OllamaChatBody, body, LIMITS), LIMITS).sampling


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "model", "m"),
        ({}, "stream", True),
        ({"stream": False}, "stream", False),
        ({"options": {"num_predict": 5}}, "max_tokens", 5),
        ({"options": {"num_predict": -2}}, "max_tokens", None),
        ({"options": {"repeat_penalty": 1.5}}, "repetition_penalty", 1.5),
        ({"options": {"stop": "x"}}, "stop", "x"),
        ({"options": {"typical_p": 0.5}}, "typical_p", 0.5),
        ({"options": {"tfs_z": 1, "mirostat": 0}}, "top_p", None),
        ({"think": True}, "chat_template_kwargs", thinking_switches(True)),
        ({"think": False}, "chat_template_kwargs", thinking_switches(False)),
        ({"think": "low"}, "reasoning_effort", "low"),
        ({"format": "", "keep_alive": -1}, "response_format", None),
    ],
)
def test_fields(fields: dict[str, object], name: str, value: object) -> None:
    assert getattr(chat_of(**fields), name) == value


@pytest.mark.parametrize(
    ("given", "penalty", "named"),
    [(-1, 1.5, []), (0, 1.0, []), (64, 1.5, ["options.repeat_last_n"]), (None, 1.5, [])],
)
def test_how_far_back_repetition_is_penalized(given: int | None, penalty: float, named: list[str]) -> None:
    ignored: list[str] = []
    body = {"model": "m", "messages": [HI], "options": {"repeat_penalty": 1.5, "repeat_last_n": given}}
    chat = ollama_chat_ask(read(OllamaChatBody, body, LIMITS, ignored.append), LIMITS).sampling
    assert chat is not None
    assert (chat.repetition_penalty, ignored) == (penalty, named)


def test_extras_of_messages_are_named() -> None:
    ignored: list[str] = []
    body = {"model": "m", "messages": [{**HI, "id": "x"}]}
    read(OllamaChatBody, body, LIMITS, ignored.append)
    assert ignored == ["messages[].id"]


def test_a_format_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat_of(format=schema).response_format.json_schema.schema_ == schema
    assert chat_of(format="json").response_format.type == "json_object"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"typical_p": 0}}, "options.typical_p"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"xtc": 1}}, "options.xtc"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop"),
        ({"messages": [{**HI, "images": ["eA=="]}]}, "messages[0].images"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_of(**fields)
    assert refused.value.status == 400
    assert message in refused.value.message
