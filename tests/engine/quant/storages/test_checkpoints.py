"""Whole checkpoints of every kind: what is loaded, what the model says, and what is wrong with broken ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.linear import DenseLinear, Linear
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.parse import read_config
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.tensors import make_recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.program.parameters import AttentionWeights, MlpWeights, Weights
from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.quant.integers import Integers
from tests.engine.driver import Driver
from tests.engine.quant.storages.checkpoints import Change, Tensors, change, change_config, store, store_all
from tests.engine.quant.storages.makers import WAYS, Maker, Way, compressed, modelopt
from tests.engine.quant.storages.test_storages import storage_of

CPU = torch.device("cpu")

EACH_STORAGE = (
    "gptq",
    "gptq-8-act-order-asym",
    "awq",
    "ct-w4a16-asym",
    "ct-w8a8",
    "ct-fp8-tensor",
    "ct-nvfp4",
    "mo-fp8",
    "mo-nvfp4",
    "ct-mxfp8",
    "fp8-block",
    "bnb-nf4-nested",
    "bnb-int8",
    "ao-int8",
    "ao-int4",
)
"""Ways that have every class of storages among them."""

Q = "model.layers.0.self_attn.q_proj"


def load(folder: Path, block_size: int = 16, quantize: str | None = None) -> LoadedModel:
    wanted = LoadOptions(
        device="cpu", num_blocks=8, num_threads=1, dtype="float32", block_size=block_size, quantize=quantize
    )
    return load_model(folder, wanted, lambda _: None, lambda *_: None)


def unpacking(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:  # noqa: ARG001
    """A packer of linear maps for tests that look at the weights themselves."""
    return DenseLinear(format.unpack(tensors), bias)


def loaded_weights(folder: Path) -> Weights:
    config = read_config(folder)
    kernels = replace(reference_kernels(CPU, torch.float32), linear=unpacking)
    recipe = make_recipe(config, LoadOptions(device="cpu"))
    return load_weights(config, TensorFiles(folder), kernels, lambda *_: None, recipe)


def matrices(weights: Weights) -> list[Tensor]:
    linears: list[Linear] = [weights.lm_head]
    for layer in weights.layers:
        assert isinstance(layer.mixer, AttentionWeights)
        assert isinstance(layer.feed_forward, MlpWeights)
        linears += [layer.mixer.qkv, layer.mixer.o, layer.feed_forward.gate_up, layer.feed_forward.down]
    assert all(isinstance(linear, DenseLinear) for linear in linears)
    assert isinstance(weights.embedding, Tensor)
    return [weights.embedding, *(linear.weight for linear in linears if isinstance(linear, DenseLinear))]


def assert_stands_for(quantized: Path, dense: Path, way: Way) -> None:
    """Compares the weights in the type that the library of the format has them in."""
    dtype = way.make(torch.randn(16, 96)).weight.dtype
    for found, wanted in zip(
        matrices(loaded_weights(quantized)), matrices(loaded_weights(dense)), strict=True
    ):
        torch.testing.assert_close(found.to(dtype), wanted.to(dtype), rtol=way.tolerance, atol=way.tolerance)


# What is loaded


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("label", EACH_STORAGE)
def test_every_layer_has_the_weights_that_are_stored(tmp_path: Path, label: str, family: str) -> None:
    """The oracle's checkpoint has them in floating point; qwen2 has biases, and ties its head to the embedding."""
    assert_stands_for(*store_all(tmp_path, WAYS[label], family=family), WAYS[label])


def logits(model: LoadedModel, tokens: Tensor) -> Tensor:
    count = len(tokens)
    batch = blank_batch([count], [count], torch.tensor([[1, 2, 3]], dtype=torch.int32))
    batch.token_ids = tokens.int()
    batch.sample_rows = torch.arange(count, dtype=torch.int32)
    with torch.inference_mode():
        return model.lm_head(model.decoder(batch))


@pytest.mark.parametrize("label", EACH_STORAGE)
def test_logits_are_those_of_transformers(tmp_path: Path, label: str) -> None:
    """By plain torch and natively. Weights that stay integers are multiplied with activations of 8 bits."""
    quantized, dense = store_all(tmp_path, WAYS[label])
    tokens = torch.arange(40) * 7
    oracle = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.inference_mode():
        wanted = oracle(tokens.unsqueeze(0)).logits[0]
    for block_size, kernels in ((32, "torch"), (16, "native")):
        model = load(quantized, block_size=block_size)
        assert model.kernels.name == kernels
        error = (logits(model, tokens) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < tolerance(WAYS[label])


def tolerance(way: Way) -> float:
    """Returns the largest allowed relative error of logits; the library may have the weights in 16 bits."""
    storage = storage_of(way.config, Q)
    if isinstance(storage.format(64, 96), Integers):
        return 0.05
    return 1e-5 if way.make(torch.randn(16, 96)).weight.dtype == torch.float32 else 0.015


def test_a_quantized_model_generates_what_its_weights_in_floating_point_do(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=tuple(range(5, 45)), sampling=sampling)
    tokens = []
    for folder in store_all(tmp_path, WAYS["bnb-nf4"]):
        driver = Driver(folder, num_blocks=16)
        driver.run(request)
        tokens.append(driver.tokens("r"))
    assert len(tokens[0]) == 12
    assert tokens[0] == tokens[1]


# Linear maps that are stored in different ways

GROUPS = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
ROWS = compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False)
FLOATS = compressed("float-quantized", num_bits=8, type="float", strategy="channel")


def mixed(folder: Path, ways: dict[str, Way]) -> tuple[Path, Path]:
    """compressed-tensors with a group for each way, which has linear maps by the ends of their names."""
    groups = {}
    for index, (end, way) in enumerate(ways.items()):
        group = way.config["config_groups"]["group_0"]
        groups[f"group_{index}"] = {**group, "format": way.config["format"], "targets": [f"re:.*{end}$"]}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}

    def maker_of(name: str) -> Maker | None:
        return next((way.make for end, way in ways.items() if name.endswith(end)), None)

    return store(folder, config, maker_of)


def test_parts_of_different_widths_are_widened(tmp_path: Path) -> None:
    """Queries and keys have 4 bits in groups, values 8 bits, a scale for each row, and offsets."""
    folders = mixed(tmp_path, {"q_proj": GROUPS, "k_proj": GROUPS, "v_proj": ROWS, "down_proj": FLOATS})
    assert_stands_for(*folders, GROUPS)


@pytest.mark.parametrize("ways", [{"gate_proj": GROUPS}, {"gate_proj": GROUPS, "up_proj": FLOATS}])
def test_parts_that_no_kernel_multiplies_together_are_unpacked(tmp_path: Path, ways: dict[str, Way]) -> None:
    quantized, dense = mixed(tmp_path, ways)
    assert_stands_for(quantized, dense, GROUPS)
    assert load(quantized).memory.weights > 0


def test_modelopt_may_have_an_algorithm_for_each_map_and_for_the_head(tmp_path: Path) -> None:
    """As in its Qwen 3.6: attention in 8 bits, feed-forward parts and the output head in 4."""
    kinds = {"self_attn": WAYS["mo-fp8"], "mlp": WAYS["mo-nvfp4"]}
    listed = {
        f"model.layers.{layer}.{part}": {"quant_algo": way.config["quant_algo"]}
        for layer in range(2)
        for part, way in kinds.items()
    }
    config = modelopt("MIXED_PRECISION", ignore=["mtp*"], quantized_layers=listed).config
    listed["lm_head"] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    quantized, dense = store(tmp_path, config, lambda name: kinds[name.split(".")[3]].make)
    head = kinds["mlp"].make(load_file(dense / "model.safetensors")["lm_head.weight"])
    change(dense, lambda tensors: tensors.update({"lm_head.weight": head.weight}))
    stored = {f"lm_head.{suffix}": tensor for suffix, tensor in head.tensors.items()}
    change(quantized, lambda tensors: tensors.update(stored))
    assert_stands_for(quantized, dense, WAYS["mo-nvfp4"])
    tokens = torch.arange(3, 40)
    torch.testing.assert_close(
        logits(load(quantized), tokens), logits(load(dense), tokens), rtol=1e-4, atol=1e-4
    )


def test_parts_whose_inputs_are_permuted_in_different_ways_are_refused(tmp_path: Path) -> None:
    quantized, _ = store_all(tmp_path, WAYS["gptq-act-order"])
    change(quantized, lambda tensors: tensors[f"{Q}.g_idx"].copy_(tensors[f"{Q}.g_idx"].flip(0)))
    with pytest.raises(
        CheckpointError, match=r"0.self_attn.q_proj, .*v_proj: weights .* permuted in different ways"
    ):
        load(quantized)


# What is wrong with broken ones


def spoil(suffix: str, value: float) -> Change:
    """Puts a value into a tensor of Q."""

    def put(tensors: Tensors) -> None:
        tensors[f"{Q}.{suffix}"].view(-1)[-1] = value

    return put


def put(suffix: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{Q}.{suffix}": tensor})


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{Q}.{suffix}")


def bytes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
INF = float("inf")
FP8 = torch.float8_e4m3fn

BROKEN: list[tuple[str, Change, str]] = [
    ("gptq", spoil("scales", INF), "scales has values that are not finite"),
    (
        "gptq",
        drop("qzeros"),
        r"qzeros is missing; .*q_proj.* is there, which is not what quantization_config",
    ),
    ("gptq", put("scales", torch.ones(3, 64)), r"scales has shape \[3, 64\], and config.json says \[2, 64\]"),
    ("gptq", put("qweight", torch.zeros(8, 64)), "qweight is F32, which is not supported; only I32 are"),
    (
        "gptq",
        spoil("qzeros", 0),
        "qzeros has zero points other than 8, and config.json says that it is symmetric",
    ),
    ("gptq", spoil("g_idx", 0), "g_idx does not divide the inputs into groups of 32"),
    ("gptq-act-order", spoil("g_idx", 0), "g_idx does not divide the inputs into groups of 32"),
    ("gptq-act-order", spoil("g_idx", 1 << 30), "g_idx does not divide the inputs into groups of 32"),
    ("gptq-act-order", spoil("g_idx", -1), "g_idx does not divide the inputs into groups of 32"),
    ("gptq-act-order", drop("g_idx"), "g_idx is missing"),
    ("awq", spoil("scales", float("nan")), "scales has values that are not finite"),
    ("ct-w4a16", spoil("weight_scale", INF), "weight_scale has values that are not finite"),
    ("ct-w4a16", spoil("weight_shape", 61), "weight_shape says .* unlike weight_packed"),
    ("ct-w4a16-asym", drop("weight_zero_point"), "weight_zero_point is missing"),
    ("ct-w8a8", drop("weight_scale"), "weight_scale is missing"),
    ("ct-w4a8", spoil("weight", 8), "weight has numbers that are no 4-bit integers"),
    ("ct-fp8-channel", spoil("weight", float("nan")), "weight has values that are not finite"),
    ("ct-nvfp4", spoil("weight_global_scale", 0), "weight_global_scale is 0"),
    ("ct-nvfp4", spoil("weight_scale", float("nan")), "weight_scale has values that are not finite"),
    ("ct-mxfp4", spoil("weight_scale", 255), "weight_scale has values that are not finite"),
    ("ct-mxfp8", spoil("weight", float("nan")), "weight has values that are not finite"),
    ("fp8-block", spoil("weight_scale_inv", INF), "weight_scale_inv has values that are not finite"),
    ("fp8-block", put("weight_scale_inv", torch.ones(2, 1)), r"weight_scale_inv has shape \[2, 1\]"),
    ("fp8-block", put("weight", torch.zeros(64, 64)), "weight is F32, which is not supported"),
    ("bnb-nf4", spoil("weight.absmax", INF), "absmax has values that are not finite"),
    ("bnb-nf4", put("weight.absmax", torch.ones(9)), "absmax has 9 scales for 4096 weights in blocks of 64"),
    ("bnb-nf4", spoil("weight.quant_map", 2), "quant_map is not the table of nf4"),
    ("bnb-nf4", spoil(STATE, 0), "nf4 is no JSON of a quant_state"),
    ("bnb-nf4", put(STATE, bytes_of("[1]")), "nf4 is no JSON of a quant_state"),
    (
        "bnb-nf4",
        put(STATE, bytes_of('{"shape": [64, 64]}')),
        "nf4 is malformed: quant_state: blocksize is missing",
    ),
    (
        "bnb-nf4",
        put(STATE, bytes_of('{"shape": [64, 0], "blocksize": 64}')),
        "nf4 is no JSON of a quant_state",
    ),
    (
        "bnb-nf4",
        put(STATE, bytes_of('{"shape": [32, 128], "blocksize": 64}')),
        r" is stored with a weight of \[32, 128\], and config.json says \[64, 64\]",
    ),
    ("bnb-nf4", put(STATE, bytes_of('{"shape": [64, 65], "blocksize": 64}')), "which is not the size of"),
    ("bnb-nf4", put(STATE, bytes_of('{"shape": [64, 64], "blocksize": 32}')), "absmax has 64 scales"),
    ("bnb-nf4-nested", spoil("weight.nested_absmax", INF), "nested_absmax has values that are not finite"),
    (
        "bnb-nf4-nested",
        put("weight.nested_absmax", torch.ones(2)),
        "nested_absmax has 2 scales for 64 in blocks",
    ),
    ("bnb-int8", spoil("SCB", INF), "SCB has values that are not finite"),
    (
        "bnb-int8",
        put("weight_format", torch.tensor(1, dtype=torch.uint8)),
        "weight_format says that rows are inter",
    ),
    ("ao-int8", spoil("_weight_zero_point", 1), "zero_point has zero points other than 0"),
    ("ao-int8", spoil("_weight_scale", INF), "_weight_scale has values that are not finite"),
    (
        "ao-int4",
        put("_weight_act_pre_scale", torch.ones(64)),
        "act_pre_scale scales activations, which is not",
    ),
]


@pytest.mark.parametrize(
    ("label", "how", "said"), BROKEN, ids=[f"{one}-{text[:30]}" for one, _, text in BROKEN]
)
def test_a_broken_checkpoint_is_one_line_that_names_file_and_tensor(
    tmp_path: Path, label: str, how: Change, said: str
) -> None:
    quantized, _ = store_all(tmp_path, WAYS[label], num_hidden_layers=1)
    change(quantized, how)
    with pytest.raises(CheckpointError, match=f"^{quantized}[^\n]*{Q}[^\n]*{said}[^\n]*$"):
        load(quantized)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    quantized, _ = store_all(tmp_path, WAYS["gptq"])
    file = quantized / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        load(quantized)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    quantized, _ = store_all(tmp_path, WAYS["awq"])
    with pytest.raises(
        CheckpointError, match="--quantize int8: the checkpoint is quantized already, quant_method awq"
    ):
        load(quantized, quantize="int8")


def test_groups_that_do_not_divide_are_refused_before_a_file_is_looked_into(tmp_path: Path) -> None:
    quantized, _ = store_all(tmp_path, WAYS["gptq"])
    change_config(quantized, group_size=48)
    with pytest.raises(
        CheckpointError, match=r"quantization_config: groups of 48 do not divide .* 64 inputs"
    ):
        load(quantized)
