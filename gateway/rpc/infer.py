"""The Open Inference Protocol's requests for the model: tensors of text as bodies, and replies as tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from penstock.gateway.errors import invalid, unsupported
from penstock.gateway.limits import Limits
from penstock.gateway.rpc.schema import INFERENCE
from penstock.gateway.wire.embeddings import shortened
from penstock.gateway.wire.inference import (
    EMBEDDING,
    FINISH_REASON,
    INPUT,
    TEXT_INPUT,
    TEXT_OUTPUT,
    InferEmbeddingsBody,
    InferTextBody,
)
from penstock.gateway.wire.writing import Outputs, Reply


def infer_body(
    message: Any, model: str, limits: Limits
) -> tuple[type[InferTextBody | InferEmbeddingsBody], dict[str, Any]]:
    """Returns the kind of body that a ModelInferRequest is, and its fields.

    Args:
        model: is meant where the request names none.

    Raises:
        ApiError: 400 that names the tensor or the parameter that is wrong.
    """
    if len(message.inputs) != 1 or message.inputs[0].name not in (TEXT_INPUT, INPUT):
        raise invalid(f"'inputs' must be one tensor, '{TEXT_INPUT}' or '{INPUT}'.", "inputs")
    (tensor,), wanted = message.inputs, {output.name for output in message.outputs}
    is_text = tensor.name == TEXT_INPUT and EMBEDDING not in wanted
    known = {TEXT_OUTPUT, FINISH_REASON} if is_text else {EMBEDDING}
    if not wanted <= known:
        names = ", ".join(f"'{name}'" for name in sorted(known))
        raise invalid(f"'outputs' may name {names} for this input.", "outputs")
    most = limits.max_prompts if is_text else limits.max_inputs
    values = {**_parameters(message.parameters), "model": message.model_name or model}
    texts = _texts(tensor, message.raw_input_contents, most)
    return (InferTextBody if is_text else InferEmbeddingsBody), {**values, tensor.name: texts}


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None or name in ("prompt", INPUT, TEXT_INPUT):
            raise unsupported(f"parameters.{name}")
        values[name] = getattr(parameter, kind)
    return values


def _texts(tensor: Any, raw: Sequence[bytes], most: int) -> list[str]:
    """Returns the texts of a tensor; raises 400 if it is none of text, or has not as many as its shape says."""
    if tensor.datatype != "BYTES":
        raise invalid(f"The datatype of '{tensor.name}' must be 'BYTES'.", tensor.name)
    if len(raw) > 1 or (raw and tensor.contents.ListFields()):
        raise invalid(
            "'raw_input_contents' must be one, and then the input has no contents.", "raw_input_contents"
        )
    number = prod(tensor.shape)
    if not tensor.shape or min(tensor.shape) < 1 or number > most:
        raise invalid(f"The shape of '{tensor.name}' must be that of 1 to {most} texts.", tensor.name)
    texts: Iterable[bytes] = _split(raw[0], number) if raw else tensor.contents.bytes_contents[: number + 1]
    try:
        decoded = [text.decode() for text in texts]
    except UnicodeDecodeError:
        raise invalid(f"'{tensor.name}' must be text in UTF-8.", tensor.name) from None
    if len(decoded) != number:
        raise invalid(f"'{tensor.name}' must have as many texts as its shape says: {number}.", tensor.name)
    return decoded


def _split(raw: bytes, most: int) -> Iterator[bytes]:
    """Yields texts that stand behind their length; one more than `most` at the end of which something is left over."""
    start = 0
    for _ in range(most):
        end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
        if end > len(raw) or start + 4 > len(raw):
            return
        yield raw[start + 4 : end]
        start = end
    if start < len(raw):
        yield b""


@dataclass(frozen=True, slots=True)
class _Column:
    """An output: texts, or numbers."""

    name: str
    shape: list[int]
    values: Sequence[bytes] | Sequence[float]

    @property
    def is_text(self) -> bool:
        return self.name != EMBEDDING

    def tensor(self, *, has_contents: bool) -> Any:
        field = "bytes_contents" if self.is_text else "fp32_contents"
        contents = {"contents": {field: self.values}} if has_contents else {}
        datatype = "BYTES" if self.is_text else "FP32"
        return _TENSOR(name=self.name, datatype=datatype, shape=self.shape, **contents)

    def raw(self) -> bytes:
        """Returns the values as raw contents have them."""
        if self.is_text:
            texts = cast("Sequence[bytes]", self.values)
            return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        return struct.pack(f"<{len(self.values)}f", *self.values)


class InferWriter:
    """Writes the fields of a ModelInferResponse, with raw contents where the request has them."""

    def __init__(
        self, message: Any, body: InferTextBody | InferEmbeddingsBody, *, is_normalised: bool
    ) -> None:
        """
        Args:
            message: the request.
            is_normalised: whether embeddings have a length of 1.
        """
        self._body = body
        self._is_normalised = is_normalised
        self._is_raw = bool(message.raw_input_contents)
        self._shape = list(message.inputs[0].shape)
        self._wanted = {output.name for output in message.outputs}
        version, id = message.model_version, message.id
        self._head = {"model_name": body.model, "model_version": version, "id": id}

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        deltas = [delta for _, delta in outputs]
        if isinstance(self._body, InferEmbeddingsBody):
            dimensions, is_normalised = self._body.dimensions, self._is_normalised
            rows = [shortened(one.embedding or [], dimensions, is_normalised=is_normalised) for one in deltas]
            numbers = [number for row in rows for number in row]
            columns = [_Column(EMBEDDING, [len(rows), len(rows[0])], numbers)]
        else:
            shape = self._shape if prod(self._shape) == len(deltas) else [len(deltas)]
            texts = [delta.text.encode() for delta in deltas]
            reasons = [str(delta.finish_reason).encode() for delta in deltas]
            columns = [_Column(TEXT_OUTPUT, shape, texts), _Column(FINISH_REASON, shape, reasons)]
        shown = [column for column in columns if not self._wanted or column.name in self._wanted]
        parameters = {
            "prompt_tokens": INFERENCE.InferParameter(int64_param=reply.num_prompt_tokens),
            "completion_tokens": INFERENCE.InferParameter(int64_param=reply.num_output_tokens),
        }
        return {
            **self._head,
            "parameters": parameters,
            "outputs": [column.tensor(has_contents=not self._is_raw) for column in shown],
            "raw_output_contents": [column.raw() for column in shown] if self._is_raw else [],
        }


_TENSOR = INFERENCE.ModelInferResponse.InferOutputTensor
