from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.fields import Fields
from penstock.engine.kernels import select as selecting
from penstock.engine.kernels.cpu import levels, native
from penstock.engine.kernels.cpu.levels import VARIABLE, Machine
from penstock.engine.kernels.cpu.native import BLOCK_SIZE, NativeUnavailable
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.packed import PACKED_FORMATS, UnpackedLinear
from penstock.engine.kernels.select import only_what_runs, select, trials, triton_kernels
from penstock.engine.model.dtype import check_kv_heads, choose_device, choose_dtype, choose_kv_dtype
from penstock.engine.model.parse import parse_config
from penstock.engine.model.tensors import make_recipe
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Integers
from penstock.engine.quant.quantization import Quantization
from penstock.engine.spec import Experts, GatedDelta, LatentAttention, Mamba2, Router, ShortConv
from tests.engine import skip_reasons
from tests.engine.checkpoints import make_config
from tests.engine.configs import state_config, with_attention

CONFIG = parse_config(Fields("config.json", make_config("llama")))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def with_experts(config: ModelConfig) -> ModelConfig:
    router = Router(num_experts=8, top_k=2)
    part = Experts(hidden_size=config.hidden_size, inner_size=32, router=router)
    layers = tuple(replace(layer, feed_forward=part) for layer in config.layers)
    return replace(config, spec=replace(config.spec, layers=layers))


SPARSE = with_experts(CONFIG)
STATES = state_config(
    CONFIG.layers[0].attention,
    GatedDelta(hidden_size=8, num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4),
    Mamba2(hidden_size=8, num_heads=2, head_dim=4, num_groups=1, state_size=4),
    ShortConv(hidden_size=8, channels=8),
)
LATENTS = state_config(
    LatentAttention(
        hidden_size=8,
        num_heads=2,
        query_rank=0,
        latent_size=16,
        plain_size=4,
        rotated_size=8,
        value_size=4,
        scale=0.25,
    )
)


def choose(
    config: ModelConfig = CONFIG, block_size: int = BLOCK_SIZE, kv_dtype: str = "auto"
) -> tuple[Kernels, list[str]]:
    said: list[str] = []
    options = LoadOptions(block_size=block_size, num_threads=1, kv_dtype=kv_dtype)
    return select(config, CPU, torch.float16, options, said.append), said


def test_a_cpu_gets_the_native_decoder_where_it_can_be_built() -> None:
    try:
        native.load_library(lambda _: None)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    kernels, said = choose()
    assert (kernels.name, said) == ("native", [])
    assert kernels.team is not None
    assert (kernels.embedding_dtype, kernels.kv_dtype, kernels.activation_dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
    )


def test_without_a_compiler_plain_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: object) -> native.NativeLibrary:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "load_library", unavailable)
    kernels, said = choose()
    assert kernels.name == "torch"
    assert kernels.team is None
    assert len(said) == 1
    assert "no compiler" in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize(
    ("config", "block_size", "kv_dtype", "reason"),
    [
        (CONFIG, 32, "auto", "blocks of 16 tokens, not 32"),
        (with_attention(CONFIG, head_dim=12), 16, "auto", "multiple of 8, not 12"),
    ],
)
def test_what_the_native_kernels_cannot_do_plain_torch_does(
    config: ModelConfig, block_size: int, kv_dtype: str, reason: str
) -> None:
    kernels, said = choose(config, block_size, kv_dtype)
    assert kernels.name == "torch"
    assert reason in said[0]


def test_plain_torch_on_a_cpu_is_float32() -> None:
    kernels = reference_kernels(CPU, torch.bfloat16)
    assert kernels.embedding_dtype == kernels.activation_dtype == kernels.kv_dtype == torch.float32


def choose_on_a_gpu(config: ModelConfig = CONFIG) -> tuple[Kernels, list[str]]:
    said: list[str] = []
    return select(config, CUDA, torch.bfloat16, LoadOptions(), said.append), said


class OnGpu:
    """Triton's table is made on the CPU, and tried by the test's own trials, by name."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        trial: Callable[[str], None] = lambda _: None,
        config: ModelConfig = CONFIG,
    ) -> None:
        make, names = triton_kernels, trials(reference_kernels(CPU, torch.float32), config, LoadOptions())

        def elsewhere(config: ModelConfig, device: torch.device, *rest: Any) -> Kernels:
            return replace(make(config, CPU, *rest), device=device)

        monkeypatch.setattr(selecting, "triton_kernels", elsewhere)
        monkeypatch.setattr(selecting, "trials", lambda *_: {name: partial(trial, name) for name in names})


@pytest.mark.parametrize(
    "config", [CONFIG, SPARSE, STATES, LATENTS], ids=["dense", "experts", "states", "latents"]
)
def test_a_gpu_gets_triton_in_the_dtype_asked_for(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason=skip_reasons.TRITON)
    tried: list[str] = []
    OnGpu(monkeypatch, tried.append, config)
    kernels, said = choose_on_a_gpu(config)
    assert (kernels.name, kernels.device, said) == ("triton", CUDA, [])
    assert kernels.embedding_dtype == kernels.activation_dtype == kernels.kv_dtype == torch.bfloat16
    assert kernels.is_static
    plain = reference_kernels(CUDA, torch.bfloat16)
    brought = {
        field.name for field in fields(Kernels) if getattr(kernels, field.name) != getattr(plain, field.name)
    }
    of_writes = {"rotate_and_write", "rotate_and_write_latents"}
    of_some = {"route", "run_experts", "gated_delta", "mamba2", "short_conv", *of_writes}
    unasked = {"name", "is_static", "linear", "expert_linear"} | (of_some - set(tried))
    assert brought - unasked == set(tried), "every kernel that Triton brings is tried"
    assert ("route" in tried, "mamba2" in tried) == (config is SPARSE, config is STATES)
    assert of_writes & set(tried) == {"rotate_and_write" + "_latents" * (config is LATENTS)}


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'triton'"),
        RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable."),
        CalledProcessError(1, ["gcc"]),
        AssertionError(),
    ],
)
def test_a_gpu_without_triton_gets_plain_torch_and_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Kernels:
        raise error

    monkeypatch.setattr(selecting, "triton_kernels", broken)
    kernels, said = choose_on_a_gpu()
    assert (kernels.name, kernels.device) == ("torch", CUDA)
    assert kernels.embedding_dtype == kernels.activation_dtype == kernels.kv_dtype == torch.bfloat16
    assert len(said) == 1
    assert str(error).partition("\n")[0] in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize(
    ("name", "is_static"),
    [
        ("rms_norm", True),
        ("attention", False),
        ("choose", True),
        ("rotate_and_write", False),
        ("route", True),
        ("run_experts", False),
    ],
)
def test_a_kernel_that_does_not_run_is_replaced_alone(
    name: str, is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason=skip_reasons.TRITON)

    def broken(tried: str) -> None:
        if tried == name:
            raise AssertionError("out of resource: shared memory")

    OnGpu(monkeypatch, broken, SPARSE)
    chosen, said = choose_on_a_gpu(SPARSE)
    assert chosen.name == "triton"
    assert getattr(chosen, name) == getattr(reference_kernels(CPU, torch.float32), name)
    assert chosen.glu != reference_kernels(CPU, torch.float32).glu
    assert chosen.is_static == is_static
    assert f"the Triton kernel {name} does not run here (out of resource: shared memory)" in said[0]
    assert (len(said) == 1) == is_static


def test_where_no_kernel_runs_all_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=skip_reasons.TRITON)

    def broken(_: str) -> None:
        raise RuntimeError("ptxas is missing")

    OnGpu(monkeypatch, broken)
    chosen, said = choose_on_a_gpu()
    assert (chosen.name, chosen.is_static) == ("torch", False)
    assert all("ptxas is missing" in line for line in said)


def test_a_lost_device_is_no_kernel_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=skip_reasons.TRITON)

    def lost(_: str) -> None:
        raise torch.AcceleratorError("gone")

    OnGpu(monkeypatch, lost)
    with pytest.raises(torch.AcceleratorError):
        choose_on_a_gpu()


def test_a_product_of_integers_that_does_not_run_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told once for all maps of its kind."""
    pytest.importorskip("triton", reason=skip_reasons.TRITON)
    from penstock.engine.kernels.triton import packed_linear

    def fails(*_: object) -> Tensor:
        raise RuntimeError("no registers\nand more")

    monkeypatch.setattr(packed_linear, "multiply", fails)
    said: list[str] = []
    kernels = triton_kernels(CONFIG, CPU, torch.float32, LoadOptions(), said.append)
    assert (Integers in kernels.packs, Float8 in kernels.packs) == (True, True)
    format = Integers(4, 32)
    tensors = {
        "weight": torch.randint(-8, 8, (6, 64)).to(torch.int8),
        "scale": torch.rand(6, 2),
    }
    x = torch.randn(3, 64)
    for _ in range(2):
        linear = kernels.linear(tensors, format, None)
        assert isinstance(linear, UnpackedLinear)
        torch.testing.assert_close(linear(x), x @ format.unpack(tensors).T, rtol=1e-4, atol=1e-4)
    assert said == [
        "the Triton product with int4 does not run here (no registers); "
        "plain torch serves instead, many times slower"
    ]


def test_experts_whose_product_does_not_run_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is told once for all of a kind: in 16 bits they run, as the trials showed."""
    pytest.importorskip("triton", reason=skip_reasons.TRITON)
    from penstock.engine.kernels.triton import experts
    from penstock.engine.kernels.triton.expert_weights import PackedExperts

    def fails(*_: object) -> None:
        raise RuntimeError("no registers\nand more")

    monkeypatch.setattr(experts, "multiply", fails)
    said: list[str] = []
    kernels = triton_kernels(SPARSE, CPU, torch.float32, LoadOptions(), said.append)
    format = Integers(4, 32)
    weight = torch.randint(-8, 8, (6, 64)).to(torch.int8)
    tensors: NamedTensors = {"weight": weight, "scale": torch.rand(6, 2)}
    for _ in range(2):
        packed = kernels.pack_experts([(tensors, None)], format, 1, 6)
        assert isinstance(packed, PackedExperts)
        assert isinstance(packed.weight, Tensor)
        assert torch.equal(packed.weight, format.unpack(tensors))
    assert said == [
        "the Triton product of experts in int4 does not run here (no registers); "
        "their weights take the memory of float32 instead"
    ]


def test_plain_torch_on_a_gpu_keeps_quantized_weights_packed() -> None:
    assert reference_kernels(CUDA, torch.bfloat16).packs == PACKED_FORMATS
    assert reference_kernels(CPU, torch.float32).packs == (Integers,)


@pytest.mark.parametrize(
    "config", [CONFIG, SPARSE, STATES, LATENTS], ids=["dense", "experts", "states", "latents"]
)
def test_the_trials_run_every_operation_of_a_table(config: ModelConfig) -> None:
    plain = reference_kernels(CPU, torch.float32)
    called: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        operation = getattr(plain, name)

        def call(*args: Any, **named: Any) -> Any:
            called.append(name)
            return operation(*args, **named)

        return call

    names = list(trials(plain, config, LoadOptions()))
    table = replace(plain, **{name: noting(name) for name in names})  # type: ignore[arg-type]
    said: list[str] = []
    assert only_what_runs(table, plain, trials(table, config, LoadOptions()), said.append) == table
    assert said == []
    assert list(dict.fromkeys(called)) == names


def test_what_takes_seconds_is_imported_for_its_own_table_alone() -> None:
    script = (
        "import sys, penstock.engine.execution.loader; print({'triton', 'torch._dynamo'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "device", "chosen"),
    [
        ("auto", "float32", CPU, torch.float16),
        ("auto", "float16", CPU, torch.float16),
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("auto", "float32", CUDA, torch.bfloat16),
        ("auto", "float16", CUDA, torch.float16),
        ("float32", "bfloat16", CPU, torch.float32),
        ("bfloat16", "float16", CUDA, torch.bfloat16),
    ],
)
def test_dtypes(
    monkeypatch: pytest.MonkeyPatch, wanted: str, checkpoint: str, device: torch.device, chosen: torch.dtype
) -> None:
    monkeypatch.setenv(VARIABLE, "avx2")
    assert choose_dtype(wanted, replace(CONFIG, dtype=checkpoint), device) == chosen


def test_tiles_multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "amx")
    for checkpoint in ("float32", "float16", "bfloat16"):
        assert choose_dtype("auto", replace(CONFIG, dtype=checkpoint), CPU) == torch.bfloat16
    assert choose_dtype("auto", replace(CONFIG, dtype="float16"), CUDA) == torch.float16
    assert choose_dtype("float16", CONFIG, CPU) == torch.float16


@pytest.mark.parametrize(
    ("features", "chosen"),
    [({"avx512_bf16"}, torch.bfloat16), ({"avx512_bf16", "avx512_fp16", "GenuineIntel"}, torch.float16)],
    ids=["quick", "slow"],
)
def test_pairs_of_bfloat16_are_chosen_where_they_are_quick(
    monkeypatch: pytest.MonkeyPatch, features: set[str], chosen: torch.dtype
) -> None:
    machine = Machine("x86_64", frozenset(features), lambda: "")
    monkeypatch.setattr(levels, "this_machine", lambda: machine)
    monkeypatch.setenv(VARIABLE, "avx512bf16")
    assert choose_dtype("auto", replace(CONFIG, dtype="float32"), CPU) == chosen


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(CheckpointError, match="torch sees no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == CUDA


@pytest.mark.parametrize(
    ("wanted", "own", "device", "chosen"),
    [
        ("auto", torch.float16, CPU, torch.float16),
        ("auto", torch.bfloat16, CUDA, torch.bfloat16),
        ("bfloat16", torch.bfloat16, CUDA, torch.bfloat16),
        ("int8", torch.float16, CPU, torch.int8),
        ("float32", torch.float16, CPU, torch.float32),
        ("fp8", torch.float32, CPU, torch.int8),
        ("int8", torch.bfloat16, CUDA, torch.int8),
        ("fp8", torch.float16, CUDA, torch.int8),
        ("int4", torch.float16, CPU, torch.uint8),
        ("int4", torch.bfloat16, CUDA, torch.uint8),
    ],
)
def test_types_of_the_kv_cache(
    wanted: str, own: torch.dtype, device: torch.device, chosen: torch.dtype
) -> None:
    assert choose_kv_dtype(wanted, own, device) == chosen


def test_what_is_served_on_the_cpu_alone_is_one_line_on_cuda() -> None:
    with pytest.raises(
        CheckpointError, match=r"^--kv-dtype float32 is served on the CPU; .* bfloat16, int8 or int4$"
    ):
        choose_kv_dtype("float32", torch.bfloat16, CUDA)


def test_heads_that_a_cache_of_4_bits_cannot_store_are_refused() -> None:
    check_kv_heads("int4", with_attention(CONFIG, head_dim=96))
    for name in ("auto", "int8", "float16"):
        check_kv_heads(name, with_attention(CONFIG, head_dim=80))
    with pytest.raises(CheckpointError, match=r"^--kv-dtype int4 .* a multiple of 32 numbers, .* 80; int8 "):
        check_kv_heads("int4", with_attention(CONFIG, head_dim=80))


def test_nf4_is_not_made_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("int8", "int4", "fp8"):
        assert make_recipe(CONFIG, LoadOptions(device="cuda", quantize=name)).quantization is not None
    assert make_recipe(CONFIG, LoadOptions(device="cpu", quantize="nf4")).quantization is not None
    with pytest.raises(
        CheckpointError, match=r"^--quantize nf4 is served on the CPU; .* int8, int4 and fp8$"
    ):
        make_recipe(CONFIG, LoadOptions(device="cuda", quantize="nf4"))


def test_quantizations() -> None:
    assert make_recipe(CONFIG, LoadOptions(device="cpu")).quantization is None
    asked = LoadOptions(device="cpu", quantize="int4", quantize_group_size=32)
    assert make_recipe(CONFIG, asked).quantization == Quantization("int4", 32)
