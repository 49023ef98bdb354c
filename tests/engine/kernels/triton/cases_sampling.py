"""Sampling from the vocabulary of Qwen3 and from an odd one, with every filter and without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.kernels.triton import sampling, sampling_filters
from tests.engine.kernels.triton.compiling import Case

TILE = 4096
_SLOTS = {"slots": "*i32", "words": "*i32", "reals": "*fp32"}
_SEARCH = {
    **{"floats": "*fp32", "peaks": "*fp32", "searches": "*i64", "counts": "*i32", "masses": "*i64"},
}
_PREPARE = {
    **{"numbers": "*i32", "longs": "*i64", "bias_codes": "*i32", "bias_values": "*fp32", "counts": "*i32"},
    **{"values": "*fp32", "maxima": "*fp32", "floats": "*fp32", "ints": "*i32"},
}
_CHOOSE = {"values": "*fp32", **_SEARCH, "numbers": "*i32", "longs": "*i64", "ints": "*i32"}
_FINISH = {
    **{"slots": "*i32", "words": "*i32", "counts": "*i32", "floats": "*fp32", "ints": "*i32"},
    **{"token_ids": "*i32", "logprobs": "*fp32"},
}


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _cases(vocab: int, dtype: str, top_k: bool, top_p: bool) -> Iterator[Case]:
    """The launches of a step, in their order."""
    num_tiles = -(-vocab // TILE)
    filters = {"TOP_K": top_k, "TOP_P": top_p, "VOCAB": vocab, "NUM_TILES": num_tiles}
    tiled = filters | {"STRIDE": -(-vocab // 16) * 16, "TILE": TILE}
    sizes = {"MAXIMA": _power_of_2(num_tiles * sampling.GROUPS), "TILES": _power_of_2(num_tiles)}
    name = f"{'k' * top_k}{'p' * top_p}-{vocab}-{dtype}"

    def case(launch: str, kernel: Any, arguments: dict[str, str], constexprs: dict[str, Any]) -> Case:
        return Case(
            name=f"sampling-{launch}-{name}",
            kernel=kernel,
            arguments={"logits": f"*{dtype}", "logits_stride": "i32"} | _SLOTS | arguments,
            constexprs=constexprs,
            aligned=("logits_stride",) if vocab % 16 == 0 else (),
            num_warps=1 if launch == "finish" else 4,
            options={"enable_fp_fusion": False} if launch == "finish" else sampling.OPTIONS,
        )

    prepared = {"MAX_BIASES": 1152, "GROUPS": sampling.GROUPS}
    yield case("prepare", sampling.prepare_kernel, _PREPARE, tiled | prepared | {"LOGPROBS": True})
    if top_k or top_p:
        bound = filters | sizes | {"GROUPS": sampling.GROUPS}
        yield case("bound", sampling_filters.bound_kernel, _SEARCH | {"maxima": "*fp32"}, bound)
        for stage in range(3 if top_k and top_p else 2):
            searched = {"values": "*fp32", **_SEARCH}
            stages = tiled | {"STAGE": stage}
            yield case(f"histogram-{stage}", sampling_filters.histogram_kernel, searched, stages)
        yield case("choose", sampling.choose_kernel, _CHOOSE, tiled)
    if not top_k and not top_p:
        finish = {name: filters[name] for name in ("VOCAB", "NUM_TILES")}
        finish |= {"TILES": sizes["TILES"], "LOGPROBS": True}
        yield case("finish", sampling.finish_kernel, _FINISH, finish)


CASES = [
    *(
        case
        for top_k in (False, True)
        for top_p in (False, True)
        for case in _cases(151936, "bf16", top_k, top_p)
    ),
    *_cases(128257, "fp32", True, True),
]
