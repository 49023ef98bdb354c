"""The kernels of layers with a state, as published models launch them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.kernels.triton import (
    norms,
    state_kernels,
    state_tile_kernels,
    state_tile_rows,
    state_tiles,
    states,
)
from penstock.engine.kernels.triton.state_arguments import constants as constants_of
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv
from tests.engine.kernels.triton.compiling import Case

DELTA = GatedDelta(hidden_size=5120, num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)
GRANITE = Mamba2(hidden_size=1536, num_heads=48, head_dim=64, num_groups=1, state_size=128)
NEMOTRON = Mamba2(hidden_size=2688, num_heads=64, head_dim=64, num_groups=8, state_size=128)
MIXERS: dict[str, GatedDelta | Mamba2] = {
    "Qwen 3.5 27B": DELTA,
    "Qwen 3.5 27B, tiled": replace(DELTA, is_tiled=True),
    "Granite 4 H": GRANITE,
    "Nemotron 3": NEMOTRON,
    "odd": replace(
        GRANITE, num_heads=9, head_dim=80, num_groups=3, state_size=96, kernel=3, has_conv_bias=False
    ),
}
LFM2 = ShortConv(hidden_size=2048, channels=2048)


def power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def sizes(spec: GatedDelta | Mamba2) -> dict[str, int]:
    return {
        "CHANNELS": spec.history_channels,
        "ROW_FLOATS": spec.row_floats,
        "KERNEL": spec.kernel,
        "TAPS": power_of_2(spec.kernel),
    }


def kept(*, has_slots: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of what a kernel knows of slots and saves, and constants."""
    arguments = {"query_starts": "*i32", "saves": "*i32", "num_saves": "i32", "slot_stride": "i32"}
    if not has_slots:
        return arguments, dict.fromkeys(("state", "history", "pending", "slots"))
    return arguments | dict.fromkeys(("state", "history", "pending"), "*fp32") | {"slots": "*i32"}, {}


def step(name: str, dtype: str, *, has_slots: bool = True) -> Case:
    spec = MIXERS[name]
    arguments, constants = kept(has_slots=has_slots)
    numbers, constexprs = constants_of(spec)
    for field in ("conv_bias", "skip"):
        if field in spec.vectors():
            arguments[field] = "*fp32"
        else:
            constants[field] = None
    _, keys, values = spec.state_shape
    return Case(
        name=f"state, {name}, {dtype}{'' if has_slots else ', without slots'}",
        kernel=state_kernels.state_kernel,
        arguments={
            **dict.fromkeys(("made", "conv", "decay", "step_bias"), "*fp32"),
            **dict.fromkeys(("rows", "gates"), f"*{dtype}"),
            **dict.fromkeys(("row_stride", "gate_stride", "most_rows"), "i32"),
            **dict.fromkeys(numbers, "fp32"),
            **arguments,
        },
        constexprs={
            **constexprs,
            **sizes(spec),
            **constants,
            "BLOCK_KEYS": power_of_2(keys),
            "BLOCK_VALUES": min(states.PART_OF_STATE // power_of_2(keys), power_of_2(values)),
            "SAVES": state_tiles.SAVES,
        },
        aligned=("row_stride", "slot_stride"),
        num_warps=1,
    )


def keep_rows(name: str, dtype: str) -> Case:
    spec = MIXERS[name]
    arguments, _ = kept(has_slots=True)
    del arguments["state"]
    return Case(
        name=f"keep_rows, {name}, {dtype}",
        kernel=state_kernels.keep_rows_kernel,
        arguments={
            **arguments,
            **dict.fromkeys(("rows", "gates"), f"*{dtype}"),
            **dict.fromkeys(("row_stride", "gate_stride"), "i32"),
        },
        constexprs={**sizes(spec), "BLOCK": states.CHANNELS},
        aligned=("row_stride", "slot_stride"),
    )


def short_conv(spec: ShortConv, dtype: str, *, has_slots: bool = True) -> Case:
    arguments, constants = kept(has_slots=has_slots)
    for each in (arguments, constants):
        each.pop("state", None)
    if spec.has_bias:
        arguments["conv_bias"] = "*fp32"
    else:
        constants["conv_bias"] = None
    return Case(
        name=f"short_conv, {spec.channels} by {spec.kernel}, {dtype}{'' if has_slots else ', without slots'}",
        kernel=state_kernels.short_conv_kernel,
        arguments={
            **arguments,
            **dict.fromkeys(("rows", "made"), f"*{dtype}"),
            **dict.fromkeys(("num_tokens", "num_sequences"), "i32"),
            "conv": "*fp32",
        },
        constexprs={
            **constants,
            "CHANNELS": spec.channels,
            "KERNEL": spec.kernel,
            **states.conv_sizes(spec),
        },
        aligned=("slot_stride",),
    )


def gated_norm(name: str, dtype: str) -> Case:
    spec = MIXERS[name]
    gates_first = isinstance(spec, Mamba2)
    width = spec.inner_size if isinstance(spec, Mamba2) else spec.value_size
    size = width // spec.num_groups if isinstance(spec, Mamba2) else spec.value_dim
    block, parts, num_warps = norms.parts_of(width, size)
    return Case(
        name=f"gated_rms_norm, {name}, {dtype}",
        kernel=norms.gated_rms_norm_kernel,
        arguments={
            **dict.fromkeys(("made", "weight"), "*fp32"),
            **dict.fromkeys(("gates", "out"), f"*{dtype}"),
            **dict.fromkeys(("gate_stride", "num_sequences"), "i32"),
            "query_starts": "*i32",
            "eps": "fp32",
        },
        constexprs={
            "GATES_FIRST": gates_first,
            "NUM_PARTS": width // size,
            "SIZE": size,
            "PARTS": parts,
            "BLOCK": block,
        },
        aligned=("gate_stride",),
        num_warps=num_warps,
    )


def tiles(name: str, dtype: str, *, has_slots: bool = True) -> list[Case]:
    """The launches of a prompt."""
    spec = MIXERS[name]
    arguments, constants = kept(has_slots=has_slots)
    numbers, constexprs = constants_of(spec)
    blocks = state_tiles.block_sizes(spec)
    between = {
        **dict.fromkeys(("heads", "values", "found", "befores"), f"*{dtype}"),
        **dict.fromkeys(("decays", "weights"), "*fp32"),
        **dict.fromkeys(("tiles", "context_lens"), "*i32"),
        "num_sequences": "i32",
    }
    for field in ("conv_bias", "skip"):
        if field in spec.vectors():
            between[field] = "*fp32"
        else:
            constants[field] = None
    if not constexprs["IS_DELTA"]:
        del between["found"]
        constants["found"] = None

    def case(kernel: Any, own: dict[str, str], **sizes_of: Any) -> Case:
        given = {**arguments, **between, **own}
        names, solves = set(kernel.arg_names), kernel is state_tile_kernels.solve_tiles_kernel
        known = {**constexprs, **constants, **blocks, **sizes_of}
        known |= {
            "FEWEST": state_tiles.FEWEST,
            "SEQUENCES": state_tiles.SEQUENCES,
            "SAVES": state_tiles.SAVES,
        }
        return Case(
            name=f"{kernel.__name__}, {name}, {dtype}{'' if has_slots else ', without slots'}",
            kernel=kernel,
            arguments={field: kind for field, kind in given.items() if field in names},
            constexprs={field: value for field, value in known.items() if field in names},
            aligned=tuple({"row_stride", "slot_stride"} & names),
            num_warps=state_tiles.SOLVING_WARPS if solves else 4,
            most_spilled=512 if solves else 32,
            has_dot=kernel is not state_tile_rows.convolve_tiles_kernel,
        )

    columns = blocks["BLOCK_VALUES"]
    found = [
        case(
            state_tile_rows.convolve_tiles_kernel,
            {
                **dict.fromkeys(("rows", "gates"), f"*{dtype}"),
                **dict.fromkeys(("conv", "decay", "step_bias"), "*fp32"),
                **dict.fromkeys(("row_stride", "gate_stride"), "i32"),
                **dict.fromkeys(numbers, "fp32"),
            },
            **sizes(spec),
            BLOCK_HEADS=power_of_2(constexprs["NUM_HEADS"]),
        ),
        case(
            state_tile_kernels.carry_state_kernel, {}, COLUMNS=min(columns, state_tiles.CARRIED[type(spec)])
        ),
        case(state_tile_kernels.read_tiles_kernel, {"made": "*fp32"}, COLUMNS=min(columns, state_tiles.READ)),
    ]
    if has_slots:
        found.append(
            case(
                state_tile_kernels.finish_states_kernel,
                {},
                COLUMNS=min(columns, state_tiles.CARRIED[type(spec)]),
            )
        )
    return found if "found" in constants else [*found, case(state_tile_kernels.solve_tiles_kernel, {})]


CASES = [
    *(step(name, "bf16") for name in MIXERS),
    *(step(name, "fp16", has_slots=False) for name in ("Qwen 3.5 27B", "Granite 4 H")),
    *(keep_rows(name, "bf16") for name in ("Qwen 3.5 27B", "Nemotron 3", "odd")),
    *(short_conv(LFM2, dtype) for dtype in ("bf16", "fp32")),
    short_conv(replace(LFM2, channels=100, kernel=4, has_bias=True), "fp16", has_slots=False),
    *(gated_norm(name, "bf16") for name in MIXERS),
    *(case for name in MIXERS for case in tiles(name, "bf16")),
    *(case for name in ("Qwen 3.5 27B", "Granite 4 H") for case in tiles(name, "fp16", has_slots=False)),
]
