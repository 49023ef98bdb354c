"""The Open Inference Protocol's requests as bodies: texts to continue, or to turn into vectors, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, ClassVar

from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, completion_ask
from penstock.gateway.wire.embeddings import EmbeddingsBody
from penstock.gateway.wire.schemas import CompletionBody

TEXT_INPUT, INPUT = "text_input", "input"
TEXT_OUTPUT, FINISH_REASON, EMBEDDING = "text_output", "finish_reason", "embedding"


def server_metadata() -> dict[str, Any]:
    return {"name": "penstock", "version": version("penstock"), "extensions": []}


def model_metadata(name: str, embedding_size: int | None) -> dict[str, Any]:
    """Returns the protocol's description of the model; -1 stands for a dimension of any size."""
    texts = (TEXT_INPUT, INPUT), (TEXT_OUTPUT, FINISH_REASON)
    inputs, outputs = (
        [{"name": one, "datatype": "BYTES", "shape": [-1]} for one in names] for names in texts
    )
    outputs.append({"name": EMBEDDING, "datatype": "FP32", "shape": [-1, embedding_size or -1]})
    return {"name": name, "versions": ["1"], "platform": "penstock", "inputs": inputs, "outputs": outputs}


class InferTextBody(CompletionBody):
    """A ModelInferRequest for text: its parameters are fields of completions, as far as its response can show them."""

    ALIASES: ClassVar[Mapping[str, str]] = {**CompletionBody.ALIASES, TEXT_INPUT: "prompt"}
    NOT_SUPPORTED = frozenset(
        {
            *("best_of", "echo", "logprobs", "prompt_logprobs", "return_token_ids", "stream"),
            *("return_tokens_as_token_ids", "stream_options", "use_beam_search"),
        }
    )


class InferEmbeddingsBody(EmbeddingsBody):
    """A ModelInferRequest for embeddings."""

    ALIASES: ClassVar[Mapping[str, str]] = {TEXT_INPUT: INPUT}
    NOT_SUPPORTED = frozenset({"encoding_format"})


def infer_text_ask(body: InferTextBody, limits: Limits) -> Ask:
    ask = completion_ask(body, limits)
    assert isinstance(ask.input, tuple)
    texts = tuple(replace(texts, field=TEXT_INPUT) for texts in ask.input)
    return replace(ask, field=TEXT_INPUT, input=texts)
