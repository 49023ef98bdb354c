"""Sampling from the vocabulary of Qwen3 and from an odd one, with every filter and without any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.kernels.triton import sampling
from tests.engine.kernels.triton.compiling import Case

_PREPARE = {
    **{"logits": "*bf16", "logits_stride": "i32", "slots": "*i32", "numbers": "*i32", "words": "*i32"},
    **{"reals": "*fp32", "bias_codes": "*i32", "bias_values": "*fp32", "counts": "*i32", "values": "*fp32"},
    **{"floats": "*fp32", "ints": "*i32"},
}
_SEARCH = {
    **{"slots": "*i32", "words": "*i32", "reals": "*fp32", "logits": "*bf16", "logits_stride": "i32"},
    **{"values": "*fp32", "floats": "*fp32"},
    **{"old_interval": "*fp64", "old_above": "*fp64", "interval": "*fp64", "above": "*fp64"},
}
_MASS = {
    **{"slots": "*i32", "words": "*i32", "reals": "*fp32", "doubles": "*fp64"},
    **{"logits": "*bf16", "logits_stride": "i32", "values": "*fp32", "floats": "*fp32"},
    **{"interval": "*fp64", "above": "*fp64", "masses": "*fp64"},
}
_CHOOSE = {
    **_MASS,
    **{"longs": "*i64", "numbers": "*i32", "counts": "*i32", "ints": "*i32", "token_ids": "*i32"},
    **{"logprobs": "*fp32"},
}


def _cases(vocab: int, dtype: str) -> Iterator[Case]:
    tiles = -(-vocab // 4096)
    shape: dict[str, Any] = {
        **{"VOCAB": vocab, "STRIDE": -(-vocab // 16) * 16, "NUM_TILES": tiles, "TILE": 4096},
    }
    searched = shape | {"TILES": 64, "PARTS": sampling.WAYS}
    name, logits = f"{vocab}-{dtype}", {"logits": f"*{dtype}"}
    aligned = ("logits_stride",) if vocab % 16 == 0 else ()
    prepared = shape | {"MAX_BIASES": 1152, "BLOCK": sampling.BIAS_BLOCK}
    yield Case(
        name=f"sampling-prepare-{name}",
        kernel=sampling.prepare_kernel,
        arguments=_PREPARE | logits,
        constexprs=prepared,
        aligned=aligned,
        options=sampling.OPTIONS,
    )
    for by_count in (True, False):
        for number in (0, 1):
            yield Case(
                name=f"sampling-search-{'k' if by_count else 'p'}-{number}-{name}",
                kernel=sampling.search_kernel,
                arguments=_SEARCH | logits,
                constexprs=searched
                | {"BY_COUNT": by_count, "STARTS": number == 0, "SCALES": number == 1 and not by_count}
                | {"CONTINUES": number > 0 or not by_count},
                aligned=aligned,
                options=sampling.OPTIONS,
            )
    for is_searched in (True, False):
        end = f"{'searched' if is_searched else 'plain'}-{name}"
        constexprs = searched | {"SEARCHED": is_searched}
        yield Case(
            name=f"sampling-mass-{end}",
            kernel=sampling.mass_kernel,
            arguments=_MASS | logits,
            constexprs=constexprs,
            aligned=aligned,
            options=sampling.OPTIONS,
        )
        yield Case(
            name=f"sampling-choose-{end}",
            kernel=sampling.choose_kernel,
            arguments=_CHOOSE | logits,
            constexprs=constexprs,
            aligned=aligned,
            options=sampling.OPTIONS,
        )


_READING_LOGITS = (sampling.prepare_kernel, sampling.choose_kernel)
CASES = [
    *_cases(151936, "bf16"),
    *(case for case in _cases(128257, "fp32") if case.kernel in _READING_LOGITS),
]
