"""A card of 1,000 GB/s and 500 TFLOP/s is measured as one: every kernel takes the time that its work must take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from loadtests.gpu import experts, figures, kernels, quantized, sizes, timing
from loadtests.gpu.parts import Outcome
from penstock.engine.fields import Fields
from penstock.engine.kernels import ops
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.packed import Code, PackedWeight
from penstock.engine.model.parse import parse_config
from penstock.engine.planning.request import SamplingParams

BYTES_PER_S, FLOP_PER_S = 1e12, 5e14
META = torch.device("meta")
Figures = dict[str, tuple[float, str, str]]
MEASURES = ["ceilings", "decode", "slope", "prefill", "elementwise", "sampler", "kv_int8"]
Sizes = list[tuple[int, int]]


class FakeCard:
    """Its kernels compute nothing; its clock goes on by what the bytes or the arithmetic of each must take."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kv_dtypes: list[str] = []
        self.num_layers: list[int] = []
        """Of each decode step of attention."""
        self.calls = Counter[object]()
        self.formats = set[tuple[Code, int]]()

    def read(self, what: object, num_bytes: float) -> None:
        self.calls[what] += 1
        self.now_s += num_bytes / BYTES_PER_S

    def seconds(self, device: torch.device, run: Callable[[], object]) -> float:
        assert device == META
        before_s = self.now_s
        run()
        return self.now_s - before_s

    def select(
        self, _: object, device: torch.device, dtype: torch.dtype, options: Any, __: object
    ) -> ops.Kernels:
        assert options.block_size == 16
        self.kv_dtypes.append(options.kv_dtype)
        fakes: dict[str, Any] = {
            "rms_norm": self.rms_norm,
            "add_rms_norm": self.add_rms_norm,
            "glu": lambda x, _: self.read("silu_mul", 1.5 * x.nbytes),
            "rotate_and_write": self.rotate,
            "attention": self.attention,
        }
        return replace(ops.reference_kernels(device, dtype), **fakes)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> None:
        assert (weight.shape, epsilon) == ((4096,), 1e-5)
        self.read("rms_norm", 2 * x.nbytes)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> None:
        assert (weight.shape, epsilon) == ((4096,), 1e-5)
        self.read("add_rms_norm", 2 * (x.nbytes + y.nbytes))

    def attention(self, batch: Batch, _: KVShape) -> Callable[..., None]:
        """A decode reads all blocks of a layer but the first, which belongs to nobody; a chunk computes products."""
        num_tokens, context = batch.token_ids.numel(), batch.block_tables.shape[1] * 16

        def attend(queries: Tensor, layer: Tensor, window: int, *_: object) -> None:
            assert (queries.shape, window) == ((num_tokens, 32, 128), 0)
            if batch.max_query_len == 1:
                self.num_layers[-1] += 1
                self.read("attention", layer[:, 1:].nbytes)
            else:
                attended = sum(range(context - num_tokens + 1, context + 1))
                self.now_s += 4 * 32 * 128 * attended / FLOP_PER_S

        if batch.max_query_len == 1:
            self.num_layers.append(0)
        return attend

    def rotate(self, x: Tensor, *rest: Any) -> None:
        """Reads queries, keys and values; writes all of them, keys and values as they are stored."""
        assert rest[2] == 1e-5
        num_stored = 8 * (128 + (4 if rest[4].dtype.itemsize == 1 else 0))
        self.read(
            "rotate_and_write", x.nbytes + len(x) * (4096 * 2 + 2 * num_stored * rest[4].dtype.itemsize)
        )

    def route(self, logits: Tensor, *_: object) -> None:
        self.read("route", 1e6 * len(logits))

    def run_experts(self, x: Tensor, ids: Tensor, _: Tensor, *maps: Any) -> None:
        """Reads the experts that are chosen, of 128."""
        assert x.dtype == torch.bfloat16
        assert ids.shape == (len(x), 8)
        sizes = [each.nbytes if isinstance(each, Tensor) else each.num_bytes for each in maps[:2]]
        self.read(sum(sizes), sum(sizes) * min(128, ids.numel()) / 128)

    def linear(self, weight: PackedWeight | Tensor, _: object = None) -> FakeLinear:
        if isinstance(weight, Tensor):
            return FakeLinear(self, weight.nbytes)
        self.formats.add((weight.code, weight.group_size))
        return FakeLinear(self, weight.num_bytes)


class FakeLinear:
    def __init__(self, card: FakeCard, num_bytes: int) -> None:
        self._card, self.num_bytes = card, num_bytes

    def __call__(self, x: Tensor) -> None:
        assert x.dtype == torch.bfloat16
        self._card.read(self.num_bytes, self.num_bytes)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    card = FakeCard()
    monkeypatch.setattr(sizes.Arguments, "device", META)
    for module in (kernels, quantized, experts):
        monkeypatch.setattr(module, "seconds", card.seconds)
    monkeypatch.setattr(timing.Ceilings, "measured", lambda *_: timing.Ceilings(BYTES_PER_S, FLOP_PER_S))
    monkeypatch.setattr(kernels, "select", card.select)
    monkeypatch.setattr(
        kernels, "_sampling", lambda _, logits, params: lambda: card.read(repr(params), 1e6 * len(logits))
    )
    monkeypatch.setattr(quantized, "make_linear", lambda *_: card.linear)
    monkeypatch.setattr(quantized, "DenseLinear", card.linear)
    table = experts.Table(card.route, card.run_experts, lambda weight, *_: weight)  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "table", lambda _: table)
    return card


def measured(part: ModuleType, mode: str, monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Runs a part, and returns what it emits."""
    found = Outcome("")
    monkeypatch.setattr(part, "parse_arguments", lambda: sizes.Arguments(mode, Path("/nowhere"), ()))
    monkeypatch.setattr(figures, "_tell", lambda said: found.take(json.dumps(said)))
    monkeypatch.setattr(kernels, "_measure_elsewhere", lambda *_: 1)
    assert part.main() == 0
    assert not found.skipped
    return {figure.name: (figure.value, figure.unit, figure.how) for figure in found.figures}


def assert_same(found: Figures, expected: Figures) -> None:
    """In the same order, and values but for rounding."""
    assert list(found) == list(expected)
    for name, (value, *words) in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-10), *words), name


def expected_of_kv(kv: str, decode: Sizes, slope: list[int], bytes_per_token: int) -> Figures:
    """Attention and what writes its cache; a token's keys and values take so many bytes in a layer."""
    found: Figures = {}
    for sequences, context in decode:
        how = f"of keys and values, {sequences * context * bytes_per_token / 1e6:.1f} us a layer"
        found[f"attention decode{kv}, batch {sequences}, context {context:,}"] = 1000, "GB/s", how
    how = "batch 1, a line through " + ", ".join(f"{context:,}" for context in slope)
    name = f"llama-8b: attention, KV slope of all layers{kv}"
    found[name] = 32 * bytes_per_token / 1e9, "ms per token", how
    for chunk, how in (
        ("2,048 tokens", "0.07 ms a layer"),
        ("8,192 tokens", "1.10 ms a layer"),
        ("4,096 after 28,672", "4.12 ms a layer"),
    ):
        found[f"attention prefill{kv}, {chunk}"] = 500, "TFLOP/s", how
    return found


def expected_of_kernels(decode: Sizes, slope: list[int], sampler_rows: list[int]) -> Figures:
    matmul = 500, "TFLOP/s", "torch.bfloat16, 8,192 x 8,192 x 8,192, random numbers"
    copy = 1000, "GB/s", "read and written, a copy of 4,096 MiB"
    found: Figures = {"matmul rate": matmul, "copy bandwidth": copy}
    found |= expected_of_kv("", decode, slope, 4096)
    for name, how in (
        ("rms_norm", "134.2 us"),
        ("add_rms_norm", "268.4 us"),
        ("silu_mul", "704.6 us"),
        ("rotate_and_write", "201.3 us"),
    ):
        found[f"{name}, 8,192 rows"] = 1000, "GB/s", how
    for rows in sampler_rows:
        for name in ("greedy", "drawn", "min-p 0.05", "top-k 40", "top-p 0.9", "top-k 40, top-p 0.9"):
            found[f"sampler, {rows} rows, {name}"] = rows, "us", "128,256 tokens"
    found |= expected_of_kv(", KV int8", decode, slope, 2 * 8 * (128 + 4))
    found["rotate_and_write, KV int8, 8,192 rows"] = 1000, "GB/s", "185.1 us"
    return found


def test_a_full_run_measures_every_kernel(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = [(1, 1024), (1, 8192), (1, 32_768), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024)]
    expected = expected_of_kernels(decode, [2048, 8192, 16_384, 32_768], [1, 64, 256])
    assert_same(measured(kernels, "full", monkeypatch), expected)
    assert card.kv_dtypes == ["auto", "int8"]
    # A GiB is read before anything is read again: layers of so many bytes of keys and values, or copies of a tensor.
    assert card.num_layers[:12] == [32, 32, 8, 32, 4, 4, 1, 1, 32, 32, 32, 32]
    assert card.num_layers[12:24] == [32, 32, 15, 32, 7, 7, 1, 1, 32, 32, 32, 32]
    assert {name: card.calls[name] for name in ("rms_norm", "add_rms_norm", "silu_mul", "rotate_and_write")} == {
        "rms_norm": 16, "add_rms_norm": 16, "silu_mul": 2, "rotate_and_write": 2 * 10,
    }  # fmt: skip
    drawn: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"min_p": 0.05}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}
    ]  # fmt: skip
    assert {repr(SamplingParams(**each)) for each in drawn} < card.calls.keys()


@pytest.mark.usefixtures("card")
def test_a_quick_run_measures_every_kernel_at_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of_kernels([(1, 8192), (64, 1024)], [2048, 16_384], [64])
    assert_same(measured(kernels, "quick", monkeypatch), expected)


def expected_of_linear_maps(all_rows: list[int]) -> Figures:
    """An 8 B layer has 218,103,808 weights in four maps of 43,008 rows; a group has a scale in 16 bits."""
    num_weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    num_rows = (4096 + 2 * 1024) + 4096 + 2 * 14_336 + 4096
    found: Figures = {}
    for name, num_bytes in (
        ("16 bits", num_weights * 2),
        ("int8", num_weights + num_rows * 2),
        ("int8, groups of 128", num_weights + num_weights // 128 * 2),
        ("int4, groups of 128", num_weights // 2 + num_weights // 128 * 2),
        ("int4, groups of 128 with zeros", num_weights // 2 + num_weights // 128 * 3),
        ("int4, groups of 32", num_weights // 2 + num_weights // 32 * 2),
        ("int4, groups of 32 with offsets", num_weights // 2 + num_weights // 32 * 4),
        ("fp8", num_weights + num_rows * 2),
        ("fp8, blocks of 128", num_weights + num_weights // 128 * 2),
    ):
        for rows in all_rows:
            flop_per_s = 2 * rows * num_weights / num_bytes * BYTES_PER_S
            how = (
                f"of weights, {num_bytes / 1e6:.0f} us for the four maps of a layer, {flop_per_s / 1e12:.1f} TFLOP/s; "
                "a copy reaches 1,000 GB/s, a large product 500 TFLOP/s"
            )
            found[f"linear maps, {name}, {rows:,} rows"] = 1000, "GB/s", how
    return found


def test_linear_maps_of_every_format_are_measured(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expected_of_linear_maps([1, 4, 16, 64, 256, 2048])
    assert_same(measured(quantized, "full", monkeypatch), expected)
    # Copies of the four maps in 16 bits, of 48, 32, 224 and 112 MiB, are as many as a GiB holds.
    assert [card.calls[num << 20] for num in (48, 32, 224, 112)] == [21 * 6, 32 * 6, 4 * 6, 9 * 6]
    whole_rows = {(code, inputs) for code in (Code.INT8, Code.FLOAT8) for inputs in (4096, 14_336)}
    assert card.formats == whole_rows | {
        (Code.INT8, 128), (Code.INT4, 128), (Code.UINT4, 128), (Code.INT4, 32), (Code.UINT4, 32), (Code.FLOAT8, 128)
    }  # fmt: skip
    assert_same(measured(quantized, "quick", monkeypatch), expected_of_linear_maps([1, 64, 2048]))


def expected_of_experts(all_rows: list[int]) -> Figures:
    """A layer of Qwen3-30B-A3B has 128 experts of 4,718,592 weights; a group has a scale in 16 bits."""
    num_weights = 3 * 2048 * 768
    found: Figures = {f"routing, {rows:,} rows": (rows, "us", "8 of 128 experts") for rows in all_rows}
    for name, num_bytes in (
        ("16 bits", num_weights * 2),
        ("int8, groups of 128", num_weights + num_weights // 128 * 2),
        ("int4, groups of 128", num_weights // 2 + num_weights // 128 * 2),
        ("int4, groups of 128 with zeros", num_weights // 2 + num_weights // 128 * 3),
        ("fp8, blocks of 128", num_weights + num_weights // 128 * 2),
        ("mxfp4", num_weights // 2 + num_weights // 32 * 2),
    ):
        for rows in all_rows:
            num_chosen = min(128, 8 * rows)
            time_s = num_chosen * num_bytes / BYTES_PER_S
            how = (
                f"of the weights of {num_chosen} experts, {time_s * 1e6:,.0f} us a layer, "
                f"{2 * 8 * rows * num_weights / time_s / 1e12:.1f} TFLOP/s; a copy reaches 1,000 GB/s, "
                "a large product 500 TFLOP/s"
            )
            found[f"experts, {name}, {rows:,} rows"] = 1000, "GB/s", how
    return found


def test_experts_of_every_format_are_measured(card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(experts, "full", monkeypatch)
    assert_same(found, expected_of_experts([1, 4, 16, 64, 256, 2048]))
    in_16_bits = 128 * 3 * 2048 * 768 * 2
    assert card.calls[in_16_bits] == 16 + 4 + 1 + 1 + 1 + 1, "all experts are read before one is read again"
    assert_same(measured(experts, "quick", monkeypatch), expected_of_experts([1, 64, 2048]))


@pytest.mark.parametrize("part", [kernels, quantized, experts])
def test_a_dry_run_computes_all_of_it_at_tiny_sizes(
    part: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(device: torch.device, run: Callable[[], object]) -> float:
        assert device.type == "cpu"
        run()
        return 1.0

    monkeypatch.setattr(part, "seconds", once)
    monkeypatch.setattr(timing, "seconds", once)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    found = measured(part, "dry", monkeypatch)
    assert threads == [1]
    said = [
        line.rpartition("  ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("gpu: ")
    ]
    names = {
        kernels: MEASURES,
        quantized: ["ceilings", *(each.name for each in quantized.LAYOUTS)],
        experts: ["ceilings", "routing", *(each.name for each in experts.LAYOUTS)],
    }
    assert said == [f"{part.__name__.rpartition('.')[2]}: {name}" for name in names[part]]
    if part is experts:
        layer = 8 * 3 * 128 * 128
        assert found["routing, 1 rows"][0] == 1e6
        assert [found[f"experts, 16 bits, {rows} rows"][0] for rows in (1, 4)] == pytest.approx(
            [4 * layer * 2 / 8 / (1 / 4) / 1e9, 4 * layer / 1e9]
        ), "steps of one row have four in a time"
        return
    if part is quantized:
        assert {name.rpartition(", ")[2] for name in found} == {"1 rows", "4 rows"}
        num_weights = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
        assert found["linear maps, 16 bits, 4 rows"][0] == pytest.approx(4 * num_weights / 4 / 1e9), (
            "in float32"
        )
        return
    layer = 2 * 2 * 16 * 4  # the bytes of a token's keys and values in float32
    values = {name: found[name][0] for name in found if "sampler" not in name}
    assert values == pytest.approx({
        "matmul rate": 2 * 64**3 / 1e12,
        "copy bandwidth": 2 * (1 << 20) / 1e9,
        "attention decode, batch 1, context 32": 2 * 32 * layer / 1e9,
        "attention decode, batch 2, context 64": 2 * 2 * 64 * layer / 1e9,
        "llama-8b: attention, KV slope of all layers": 0,
        "attention prefill, 32 tokens": 4 * 64 * sum(range(1, 33)) / 1e12,
        "attention prefill, 16 after 48": 4 * 64 * sum(range(49, 65)) / 1e12,
        "rms_norm, 16 rows": 16 * 2 * (16 * 64 * 4) / 1e9,
        "add_rms_norm, 16 rows": 16 * 4 * (16 * 64 * 4) / 1e9,
        "silu_mul, 16 rows": 5 * 3 * (16 * 96 * 4) / 1e9,
        "rotate_and_write, 16 rows": 8 * 2 * (16 * 128 * 4) / 1e9,
        "attention decode, KV int8, batch 1, context 32": 2 * 32 * 2 * 2 * (16 + 4) / 1e9,
        "attention decode, KV int8, batch 2, context 64": 2 * 2 * 64 * 2 * 2 * (16 + 4) / 1e9,
        "llama-8b: attention, KV slope of all layers, KV int8": 0,
        "attention prefill, KV int8, 32 tokens": 4 * 64 * sum(range(1, 33)) / 1e12,
        "attention prefill, KV int8, 16 after 48": 4 * 64 * sum(range(49, 65)) / 1e12,
        "rotate_and_write, KV int8, 16 rows": 8 * 16 * (128 * 4 + 64 * 4 + 2 * 2 * (16 + 4)) / 1e9,
    })  # fmt: skip
    assert {name for name in found if "sampler" in name} == {
        f"sampler, 2 rows, {how}"
        for how in ("greedy", "drawn", "min-p 0.05", "top-k 40", "top-p 0.9", "top-k 40, top-p 0.9")
    }


def test_blocks_are_scattered_and_hold_numbers_of_their_type() -> None:
    config = parse_config(Fields("config.json", sizes.LLAMA_SMALL.config))
    device = torch.device("cpu")
    table = kernels._table(config, device, torch.float32, "int8")
    bench = kernels.Bench(config, table, sizes.KERNELS["dry"], device)
    batch, kv = kernels._scattered(bench, 1, 2, 40, num_tokens=3)
    assert sorted(batch.block_tables.flatten().tolist()) == [1, 2, 3, 4, 5, 6], "block 0 belongs to nobody"
    assert batch.block_tables.shape == (2, 3)
    assert batch.block_tables.flatten().tolist() != [1, 2, 3, 4, 5, 6]
    assert batch.context_lens.tolist() == [40, 40]
    assert batch.query_starts.tolist() == [0, 3, 6]
    assert kv.data.shape == (1, 2, 7, 2 * 16 * (16 + 4))
    assert kv.data.view(torch.float32)[..., -32:].flatten().tolist() == [pytest.approx(0.01)] * 2 * 7 * 32
    assert kv.data[..., : 2 * 16 * 16].float().std() > 30
    plain = kernels.Bench(config, kernels._table(config, device, torch.float32), sizes.KERNELS["dry"], device)
    assert kernels._scattered(plain, 1, 1, 16)[1].data.std().item() == pytest.approx(1, abs=0.1)
    assert [len(bench.copies(16, n)) for n in (4, 64, 512, 4096)] == [64, 16, 2, 1]


@pytest.mark.parametrize(
    ("layout", "row_bytes", "num_groups", "codes", "weights"),
    [
        (quantized.Layout("", Code.INT8), 224, 1, (0, 63), (0, 0.63)),
        (quantized.Layout("", Code.UINT4, 128, zero=True), 112, 2, (0, 63), (-0.08, 0.07)),
        (quantized.Layout("", Code.UINT4, 32, offset=True), 112, 7, (0, 63), (-0.08, 0.07)),
    ],
)
def test_a_random_weight_has_the_size_of_a_real_one(
    layout: quantized.Layout,
    row_bytes: int,
    num_groups: int,
    codes: tuple[int, int],
    weights: tuple[float, float],
) -> None:
    """Its 200 inputs have padding."""
    assert layout.code is not None
    weight = quantized.random_weight(layout, layout.code, 64, 200, torch.device("cpu"))
    assert weight.codes.shape == (64, row_bytes)
    assert (weight.codes.min().item(), weight.codes.max().item()) == codes
    assert weight.scale.shape == (num_groups, 64)
    assert weight.scale.dtype == torch.float16
    assert weight.codes.dtype == (torch.int8 if layout.code is Code.INT8 else torch.uint8)
    unpacked = quantized.make_linear(torch.float32, torch.device("cpu"))(weight)(torch.eye(200))
    assert (unpacked.min().item(), unpacked.max().item()) == pytest.approx(weights, abs=1e-3)
