"""Sampling from the vocabulary of Qwen3 and from an odd one, with every filter and without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.engine.kernels.triton import sampling, sampling_filters
from tests.engine.kernels.triton.compiling import Case

TILE = 4096
_ROWS = {"slots": "*i32", "words": "*i32"}
_FOUND = {"scores": "*fp32", "ints": "*i32"}
_TILES = {"values": "*fp32", "maxima": "*fp32"}
_SEARCH = {"peaks": "*fp32", "searches": "*i64", "histograms": "*i64"}
_PREPARE = {
    **_ROWS,
    **_TILES,
    "numbers": "*i32",
    "biases": "*i32",
    "counts": "*i32",
    "masks": "*i32",
    **_FOUND,
}
_CHOOSE = {**_ROWS, **_TILES, **_SEARCH, "numbers": "*i32", **_FOUND}
_FINISH = {**_ROWS, "counts": "*i32", **_FOUND, "token_ids": "*i32"}


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _cases(vocab: int, dtype: str, top_k: bool, top_p: bool, masked: bool = False) -> Iterator[Case]:
    """The launches of a step, in their order."""
    num_tiles = -(-vocab // TILE)
    num_maxima = num_tiles * sampling_filters.GROUPS
    filters = {"TOP_K": top_k, "TOP_P": top_p, "VOCAB": vocab}
    tiled = filters | {"MASKED": masked, "GROUPS": sampling_filters.GROUPS, "TILE": TILE}
    name = f"{'k' * top_k}{'p' * top_p}{'m' * masked}-{vocab}-{dtype}"

    def case(launch: str, kernel: Any, arguments: dict[str, str], constexprs: dict[str, Any]) -> Case:
        logits = {} if launch in ("bound", "finish") else {"logits": f"*{dtype}", "logits_stride": "i32"}
        return Case(
            name=f"sampling-{launch}-{name}",
            kernel=kernel,
            arguments=logits | arguments,
            constexprs=constexprs,
            aligned=("logits_stride",) if logits and vocab % 16 == 0 else (),
            num_warps=1 if launch == "finish" else 4,
            options={"enable_fp_fusion": False} if launch == "finish" else sampling.OPTIONS,
        )

    prepared = {"MAX_BIASES": 1152}
    yield case("prepare", sampling.prepare_kernel, _PREPARE, tiled | prepared)
    if top_k or top_p:
        bound = filters | {"MAXIMA": _power_of_2(num_maxima), "NUM_MAXIMA": num_maxima}
        yield case("bound", sampling_filters.bound_kernel, {**_ROWS, "maxima": "*fp32", **_SEARCH}, bound)
        for stage in (0, 1) * top_k + (2, 3) * top_p:
            searched = {**_ROWS, **_TILES, **_SEARCH}
            yield case(
                f"histogram-{stage}", sampling_filters.histogram_kernel, searched, tiled | {"STAGE": stage}
            )
        yield case("choose", sampling.choose_kernel, _CHOOSE, tiled)
    if not top_k and not top_p:
        finish = {"VOCAB": vocab, "NUM_TILES": num_tiles, "TILES": _power_of_2(num_tiles)}
        yield case("finish", sampling.finish_kernel, _FINISH, finish)


CASES = [
    *(
        case
        for top_k in (False, True)
        for top_p in (False, True)
        for case in _cases(151936, "bf16", top_k, top_p)
    ),
    *_cases(128257, "fp32", True, True),
    *_cases(128257, "fp32", True, True, masked=True),
]
