"""The Open Inference Protocol, over gRPC and its probes over HTTP."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest

from penstock.engine.engine import EngineState
from penstock.engine.planning.embedding import Embedding
from penstock.engine.planning.request import FinishReason
from penstock.gateway.access.keys import digest_of
from penstock.gateway.limits import Limits
from penstock.gateway.service import ServiceOptions
from penstock.priority.lanes import Tenant
from tests.gateway.harness import MODEL, Gateway, client
from tests.gateway.rpc.rpc_client import INFERENCE, connected, error_of, parameters, texts

pytestmark = pytest.mark.anyio

KEY = "the-key-of-ann-0123456789"


def gateway_of(**options: Any) -> Gateway:
    return Gateway(ServiceOptions(models=(MODEL,), embedding=Embedding(2), **options))


def column(reply: Any, name: str) -> list[str]:
    """The texts of an output."""
    (output,) = (output for output in reply.outputs if output.name == name)
    return [text.decode() for text in output.contents.bytes_contents]


# Text


async def test_texts_are_continued_in_their_order() -> None:
    gateway = gateway_of()
    how = parameters(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5, stop="END", service_tier="flex"
    )
    async with connected(gateway) as (inference, _):
        asking = asyncio.ensure_future(inference.ModelInfer(texts("Hi", "you", parameters=how, id="42")))
        first, second = await gateway.taken(), await gateway.taken()
        gateway.finish(second, "two", reason=FinishReason.LENGTH)
        gateway.finish(first, "one")
        reply = await asking
    assert [gateway.prompt_of(one) for one in (first, second)] == ["<|bos|>Hi", "<|bos|>you"]
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, list(sampling.stop)) == (3, 5, ["END"])
    assert (reply.model_name, reply.id) == (MODEL, "42")
    assert column(reply, "text_output") == ["one", "two"]
    assert column(reply, "finish_reason") == ["stop", "length"]
    assert [list(output.shape) for output in reply.outputs] == [[2], [2]]
    assert reply.parameters["prompt_tokens"].int64_param == 7
    await gateway.left()


async def test_raw_contents_are_read_and_the_shape_is_kept() -> None:
    gateway = gateway_of()
    raw = b"".join(struct.pack("<I", len(text)) + text for text in (b"Hi", "zwölf".encode()))
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2, 1]}
    wanted = [{"name": "text_output"}]
    request = INFERENCE.ModelInferRequest(
        model_name=MODEL, inputs=[tensor], outputs=wanted, raw_input_contents=[raw]
    )
    async with connected(gateway) as (inference, _):
        asking = asyncio.ensure_future(inference.ModelInfer(request))
        asked = [await gateway.taken(), await gateway.taken()]
        for one in asked:
            gateway.finish(one, "jä")
        reply = await asking
    (output,) = reply.outputs
    assert [gateway.prompt_of(one) for one in asked] == ["<|bos|>Hi", "<|bos|>zwölf"]
    assert (output.name, list(output.shape)) == ("text_output", [2, 1])
    assert not output.HasField("contents")
    assert list(reply.raw_output_contents) == [2 * (struct.pack("<I", 3) + "jä".encode())]


async def test_several_choices_of_one_text() -> None:
    gateway = gateway_of()
    async with connected(gateway) as (inference, _):
        request = texts("Hi", parameters=parameters(n=2))
        reply = await gateway.answering(inference.ModelInfer(request), "yes")
    assert column(reply, "text_output") == ["yes", "yes"]
    assert list(reply.outputs[0].shape) == [2]


def tensor(**fields: Any) -> Any:
    request = texts("Hi")
    (given,) = request.inputs
    for name, value in fields.items():
        if name == "shape":
            given.shape[:] = value
        else:
            setattr(given, name, value)
    return request


BAD = {
    "inputs": lambda: INFERENCE.ModelInferRequest(model_name=MODEL),
    "'text_input' or 'input'": lambda: tensor(name="prompt"),
    "datatype of 'text_input'": lambda: tensor(datatype="FP32"),
    "shape of 'text_input'": lambda: tensor(shape=[]),
    "shape of 'text_input' must be that of 1 to 2 texts": lambda: tensor(shape=[2, 2]),
    "as many texts as its shape says: 2": lambda: tensor(shape=[2]),
    "as many texts as its shape says: 1": lambda: _raw(b"\2\0\0\0Hix"),
    "its shape says: 1.": lambda: _raw(b"\3\0\0\0Hi"),
    "UTF-8": lambda: _raw(b"\1\0\0\0\xff"),
    "raw_input_contents": lambda: texts("Hi", raw_input_contents=[b"\0\0\0\0"]),
    "temperature": lambda: texts("Hi", parameters=parameters(temperature=-1.0)),
    "max_tokens": lambda: texts("Hi", parameters=parameters(max_tokens=0.5)),
    "colour": lambda: texts("Hi", parameters=parameters(colour="red")),
    "'stream'": lambda: texts("Hi", parameters=parameters(stream=True)),
    "'logprobs'": lambda: texts("Hi", parameters=parameters(logprobs=2)),
    "'parameters.prompt'": lambda: texts("Hi", parameters=parameters(prompt="no")),
    "'parameters.unset'": lambda: texts("Hi", parameters={"unset": INFERENCE.InferParameter()}),
    "'finish_reason', 'text_output'": lambda: texts("Hi", outputs=[{"name": "logits"}]),
    "text_input": lambda: texts("a" * 600),
    "dimensions": lambda: texts("Hi", name="input", parameters=parameters(dimensions=3)),
    "encoding_format": lambda: texts("Hi", name="input", parameters=parameters(encoding_format="base64")),
}


def _raw(contents: bytes) -> Any:
    given = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    return INFERENCE.ModelInferRequest(model_name=MODEL, inputs=[given], raw_input_contents=[contents])


@pytest.mark.parametrize("named", BAD)
async def test_a_bad_tensor_or_parameter_is_named(named: str) -> None:
    async with connected(gateway_of(limits=Limits(max_prompts=2))) as (inference, _):
        error = await error_of(inference.ModelInfer(BAD[named]()))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.details()


async def test_a_cancelled_call_takes_its_request_along() -> None:
    gateway = gateway_of()
    async with connected(gateway) as (inference, _):
        call = inference.ModelInfer(texts("Hi"))
        asking = asyncio.ensure_future(call.code())
        asked = await gateway.taken()
        call.cancel()
        await gateway.left()
        assert await asking == grpc.StatusCode.CANCELLED
    assert gateway.engine.cancelled == [asked.request_id]


async def test_a_request_that_fails_is_told() -> None:
    gateway = gateway_of()
    async with connected(gateway) as (inference, _):
        asking = asyncio.ensure_future(error_of(inference.ModelInfer(texts("Hi"))))
        gateway.finish(await gateway.taken(), reason=FinishReason.FAILED, error="a bad grammar")
        error = await asking
    assert error.code() == grpc.StatusCode.INTERNAL


# Embeddings


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize(
    "how", [{"name": "input"}, {"name": "text_input", "outputs": [{"name": "embedding"}]}]
)
async def test_texts_are_turned_into_vectors(how: dict[str, Any], is_raw: bool) -> None:
    gateway = gateway_of()
    request = texts("Hi", "you", **how)
    if is_raw:
        request.inputs[0].ClearField("contents")
        request.raw_input_contents.append(b"\2\0\0\0Hi\3\0\0\0you")
    async with connected(gateway) as (inference, _):
        asking = asyncio.ensure_future(inference.ModelInfer(request))
        first, second = await gateway.taken(), await gateway.taken()
        ended: Any = {"reason": FinishReason.LENGTH, "token_ids": []}
        gateway.finish(second, embedding=[0.0, 2.0], **ended)
        gateway.finish(first, embedding=[3.0, 4.0], **ended)
        reply = await asking
    (output,), raw = reply.outputs, b"".join(reply.raw_output_contents)
    values = list(struct.unpack("<4f", raw)) if is_raw else list(output.contents.fp32_contents)
    assert gateway.prompt_of(first) == "<|bos|>Hi"
    assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [2, 2])
    assert values == pytest.approx([0.6, 0.8, 0.0, 1.0])


# State


async def test_the_server_and_its_model_say_what_they_are() -> None:
    async with connected(gateway_of()) as (inference, _), client(gateway_of().app) as http:
        server = await inference.ServerMetadata(INFERENCE.ServerMetadataRequest())
        model = await inference.ModelMetadata(INFERENCE.ModelMetadataRequest(name=MODEL))
        over_http = (await http.get(f"/v2/models/{MODEL}")).json()
        assert (await http.get("/v2")).json()["version"] == server.version
    assert server.name == "penstock"
    assert (model.name, model.platform) == (MODEL, "penstock")
    assert [tensor.name for tensor in model.inputs] == ["text_input", "input"]
    shapes = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in model.outputs}
    assert shapes == {
        "text_output": ("BYTES", [-1]),
        "finish_reason": ("BYTES", [-1]),
        "embedding": ("FP32", [-1, 2]),
    }
    assert shapes == {one["name"]: (one["datatype"], one["shape"]) for one in over_http["outputs"]}


STATES = [
    (EngineState.READY, False, True, True),
    (EngineState.STARTING, False, True, False),
    (EngineState.READY, True, True, False),
    (EngineState.FAILED, False, False, False),
]


@pytest.mark.parametrize(("state", "is_draining", "is_live", "is_ready"), STATES)
async def test_probes_follow_the_state(
    state: EngineState, is_draining: bool, is_live: bool, is_ready: bool
) -> None:
    gateway = gateway_of()
    gateway.engine.state = state
    if is_draining:
        gateway.service.begin_drain()
    async with connected(gateway) as (inference, _):
        assert (await inference.ServerLive(INFERENCE.ServerLiveRequest())).live is is_live
        assert (await inference.ServerReady(INFERENCE.ServerReadyRequest())).ready is is_ready
        assert (await inference.ModelReady(INFERENCE.ModelReadyRequest(name=MODEL))).ready is is_ready
    async with client(gateway.app) as http:
        for path, name, is_well in (
            ("/v2/health/live", "live", is_live),
            ("/v2/health/ready", "ready", is_ready),
            (f"/v2/models/{MODEL}/ready", "ready", is_ready),
        ):
            reply = await http.get(path)
            assert (reply.status_code, reply.json()[name]) == (200 if is_well else 503, is_well)


async def test_there_is_one_model_and_its_metadata_need_a_key() -> None:
    gateway = gateway_of(clients={digest_of(KEY): Tenant(name="ann")})
    named = INFERENCE.ModelMetadataRequest(name=MODEL)
    async with connected(gateway) as (inference, _), client(gateway.app) as http:
        other = await error_of(inference.ModelReady(INFERENCE.ModelReadyRequest(name="other")))
        assert other.code() == grpc.StatusCode.NOT_FOUND
        assert (await error_of(inference.ModelMetadata(named))).code() == grpc.StatusCode.UNAUTHENTICATED
        assert (await inference.ModelMetadata(named, metadata=(("api-key", KEY),))).name == MODEL
        assert (await error_of(inference.ModelInfer(texts("Hi")))).code() == grpc.StatusCode.UNAUTHENTICATED
        assert (await http.get("/v2/models/other/ready")).status_code == 404
        assert (await http.get(f"/v2/models/{MODEL}")).status_code == 401
        assert (await http.get("/v2")).status_code == 200
