"""The server with its real model, as other projects' clients use it.

LangChain is driven as it is installed. Of clients that have no package here, or whose packages are too heavy for these
tests or ask for older ones than the server's, what they send is kept as it was recorded or as their sources build it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import langchain_openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from pydantic import BaseModel, ConfigDict, Field

MODEL = "penstock-demo"
HI: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def chat(live_server: str) -> langchain_openai.ChatOpenAI:
    return langchain_openai.ChatOpenAI(
        base_url=f"{live_server}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=120,
        max_retries=0,
    )


class Sum(BaseModel):
    """Works out a sum."""

    model_config = ConfigDict(extra="forbid")
    first: Annotated[int, Field(ge=0, le=99)]
    sign: Literal["+", "-"]
    second: Annotated[int, Field(ge=0, le=99)]


def work_out(first: int, sign: str, second: int) -> int:
    """Works out a sum."""
    return first + second if sign == "+" else first - second


CALCULATOR = StructuredTool.from_function(work_out, name="calculator", args_schema=Sum)


def test_langchain_streams_what_it_is_told_in_one_piece(chat: langchain_openai.ChatOpenAI) -> None:
    whole = chat.invoke([("system", "Be polite."), ("user", "Hello!")])
    chunks = list(chat.stream([("system", "Be polite."), ("user", "Hello!")]))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content != ""
    assert len(chunks) > 2
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 2


@pytest.mark.parametrize("choice", ["calculator", "required"])
def test_langchain_calls_a_tool_and_tells_its_result(chat: langchain_openai.ChatOpenAI, choice: str) -> None:
    asked = HumanMessage("What is 12 + 30?")
    bound = chat.bind_tools([CALCULATOR], tool_choice=choice, strict=True, parallel_tool_calls=False)
    message = bound.invoke([asked])
    (call,) = message.tool_calls
    assert call["name"] == "calculator"
    result = CALCULATOR.invoke(call)
    assert result.tool_call_id == call["id"]
    told = chat.bind_tools([CALCULATOR], tool_choice="none").invoke([asked, message, result])
    assert told.content
    assert not told.tool_calls


def test_langchain_puts_a_streamed_call_together(chat: langchain_openai.ChatOpenAI) -> None:
    bound = chat.bind_tools([CALCULATOR], tool_choice="required", strict=True, parallel_tool_calls=False)
    whole, *more = bound.stream("What is 12 + 30?")
    for chunk in more:
        whole += chunk
    (call,) = whole.tool_calls
    Sum.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_answers_with_a_model_of_pydantic(
    chat: langchain_openai.ChatOpenAI, method: Literal["json_schema", "function_calling"]
) -> None:
    answer = chat.with_structured_output(Sum, method=method).invoke("What is 12 + 30?")
    assert isinstance(answer, Sum)


def test_langchain_embeds(live_server: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=f"{live_server}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["Hello", "A story"])
    assert embeddings.embed_query("Hello") == first != second


FUNCTION = {
    "name": "calculator",
    "description": "Works out a sum.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLED: Any = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
    }
]
AFTER_A_CALL: Any = [
    {"role": "system", "content": "Be polite."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "tool", "content": "5", "tool_call_id": "call_1"},
]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Sent(NamedTuple):
    """A request as a client sends it."""

    client: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = {}  # noqa: RUF012 (none of them changes it)


SENT = [
    # Recorded from litellm 1.106, with its routes for OpenAI, vLLM and Anthropic.
    Sent("litellm", "/v1/chat/completions", {"messages": HI, "model": MODEL, "max_tokens": 9, **STREAMED}),
    Sent("litellm tools", "/v1/chat/completions",
         {"messages": HI, "model": MODEL, "max_tokens": 9, "tools": TOOLS, "tool_choice": "auto", "top_k": 5}),
    Sent("litellm anthropic", "/v1/messages",
         {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}], 
          "max_tokens": 9, "tools": [{"name": "calculator", "input_schema": FUNCTION["parameters"], "type": "custom",
                     "description": "Works out a sum."}], "tool_choice": {"type": "any"}},
         {"anthropic-version": "2023-06-01", "x-api-key": "none"}),
    # Recorded from lm-eval 0.4.13: loglikelihood and generate_until of local-completions.
    Sent("lm-eval loglikelihood", "/v1/completions",
         {"model": MODEL, "prompt": [[370, 296, 266, 580]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
          "seed": 1234, "echo": True}),
    Sent("lm-eval generate_until", "/v1/completions",
         {"prompt": [[370, 296, 266, 580]], "model": MODEL, "max_tokens": 9, "temperature": 0,
          "stop": ["\n", "<|end|>"], "seed": 1234}),
    # Recorded from guidellm 0.8.1: its synthetic run over chats; completions as it builds them.
    Sent("guidellm", "/v1/completions",
         {"model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
          "max_tokens": 9, "ignore_eos": True, "prompt": "Once upon a time"}),
    Sent("guidellm chat", "/v1/chat/completions",
         {"model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
          "max_completion_tokens": 9, "ignore_eos": True,
          "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]}),
    # As Open WebUI builds them: a chat with the model's parameters, and the title of a chat.
    Sent("open webui", "/v1/chat/completions",
         {"model": MODEL, "messages": AFTER_A_CALL, "temperature": 0.7, "top_p": 0.9, "max_tokens": 9,
          "frequency_penalty": 0.1, "stop": ["```"], "seed": 3, "tools": TOOLS, **STREAMED}),
    Sent("open webui title", "/v1/chat/completions",
         {"model": MODEL, "messages": HI, "stream": False, "max_completion_tokens": 1000}),
    # As Zed's crate open_ai builds it for a thread of its agent.
    Sent("zed", "/v1/chat/completions",
         {"model": MODEL, "messages": AFTER_A_CALL, "max_completion_tokens": 9, "temperature": 1.0,
          "tool_choice": "auto", "parallel_tool_calls": False, "tools": TOOLS, "prompt_cache_key": "5f0c", **STREAMED}),
    # As Continue's converters build them.
    Sent("continue", "/v1/chat/completions",
         {"messages": AFTER_A_CALL, "model": MODEL, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9,
          "frequency_penalty": 0.1, "presence_penalty": 0.1, "stream": True, "stop": ["```"],
          "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}]}),
    Sent("continue complete", "/v1/completions",
         {"prompt": "Once upon", "model": MODEL, "max_tokens": 9, "temperature": 0.01,
          "stream": True, "stop": ["\n\n"]}),
    # Of issues that show what Claude Code sends: a line that changes, cached blocks, a system's message between turns.
    Sent("claude code", "/v1/messages?beta=true",
         {"model": MODEL, "max_tokens": 32000, "stream": True,
          "system": [
              {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"},
              {"type": "text", "text": "Be polite.", "cache_control": {"type": "ephemeral"}}],
          "messages": [
              {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
              {"role": "assistant", "content": [
                  {"type": "tool_use", "id": "toolu_1", "name": "calculator", "input": {"expression": "2 + 3"}}]},
              {"role": "user", "content": [
                  {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "5"}],
                   "is_error": False, "cache_control": {"type": "ephemeral"}}]},
              {"role": "system", "content": "<total_tokens>5000000 tokens left</total_tokens>"}],
          "tools": [{"name": "calculator", "description": "Works out a sum.", "input_schema": FUNCTION["parameters"]}],
          "metadata": {"user_id": "user_1_account__session_2"}, "stop_sequences": ["5"]},
         {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}),
]  # fmt: skip


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: sent.client)
def test_what_clients_send_is_answered(live_server: str, sent: Sent) -> None:
    reply = httpx.post(live_server + sent.path, json=sent.body, headers=sent.headers, timeout=60)
    assert reply.status_code == 200, reply.text
    assert finishes(reply)


def finishes(reply: httpx.Response) -> list[str]:
    """Why it ended, in the words of its API."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        lines = [
            line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")
        ]
        found = [json.loads(line) for line in lines]
    else:
        found = [reply.json()]
    reasons = [choice.get("finish_reason") for one in found for choice in one.get("choices") or ()]
    reasons += [
        one.get("delta", one).get("stop_reason") for one in found if isinstance(one.get("delta", one), dict)
    ]
    return [reason for reason in reasons if reason]
