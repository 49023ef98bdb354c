"""Which implementation of each operation serves a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.cpu import native
from penstock.engine.kernels.experts import ExpertLinear, ExpertPacker, ListedExperts
from penstock.engine.kernels.kv_cache import QUANTIZED, KVCache, KVLayout, KVShape, is_quantized
from penstock.engine.kernels.linear import DenseLinear, Linear, LinearPacker
from penstock.engine.kernels.ops import Kernels, Say, reference_kernels
from penstock.engine.kernels.packed import PACKED_FORMATS, UnpackedLinear, pack
from penstock.engine.kernels.recurrent import StateVectors
from penstock.engine.kernels.reference import TokenPlaces
from penstock.engine.kernels.sequence_table import SequenceTable, StepTokens
from penstock.engine.kernels.state_cache import StateCache, StateLayout, StatePlace
from penstock.engine.quant.formats import DENSE, Format, NamedTensors
from penstock.engine.sampling.tables import Filters, SamplingTables
from penstock.engine.spec import (
    Attention,
    Experts,
    GatedDelta,
    LatentAttention,
    Mamba2,
    ShortConv,
    StateMixer,
)

PREFILLED = 160
"""Tokens of a prompt that is attended on trial: more than a decode kernel ever has of one sequence."""
PROMPT_OF_STATES = 32
"""Tokens of a prompt that goes through layers with a state on trial: as few as have kernels of their own."""
ROWS_OF_EXPERTS = (1, 2, 40, 140)
"""Rows that four experts are tried with: a single one, and some of every number that has tiles of its own."""

LOOKING = {
    "attention",
    "rotate_and_write",
    "rotate_and_write_latents",
    "run_experts",
    "gated_delta",
    "mamba2",
    "short_conv",
}
"""Operations whose plain forms look at the batch on the host."""

Trial = Callable[[], object]
"""Runs one operation on a few numbers."""


def select(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, limits: LoadOptions, say: Say
) -> Kernels:
    """The fastest table for a model on a device.

    Args:
        say: is called with one line for each reason why a table is slower than it could be.
    """
    if device.type == "cuda":
        return _with_triton(model, device, dtype, limits, say)
    try:
        check_native(model, limits)
        team = native.load_library(say).start_team(limits.num_threads)
    except native.NativeUnavailable as error:
        say(f"no native CPU kernels ({error}); plain torch in float32 serves instead, several times slower")
        return reference_kernels(device, dtype)
    return native_kernels(team, dtype, keeps_types=_keeps_types(model, limits))


def _keeps_types(model: ModelConfig, limits: LoadOptions) -> bool:
    """Returns whether floats keep their type: in a GGUF file, next to integers, if no type is asked for."""
    own = model.quantization
    return own is not None and own.text("quant_method") == "gguf" and limits.dtype == "auto"


def native_kernels(team: native.Team, dtype: torch.dtype, *, keeps_types: bool = False) -> Kernels:
    """C++ for the CPU; activations are float32, weights and KV are `dtype`, quantized weights are integers.

    Args:
        keeps_types: weights in floating point stay in their own type.
    """

    def linear(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:
        if isinstance(format, native.NATIVE_FORMATS):
            return native.NativeLinear.of(team, tensors, format, bias, gated, is_exact=dtype == torch.float32)
        weight = format.unpack(tensors)
        return native.NativeLinear(team, weight, bias, weight.dtype if keeps_types else dtype, gated)

    def pack_experts(
        experts: Iterable[tuple[NamedTensors, Tensor | None]],
        format: Format,
        num_experts: int,
        out_features: int,
        *,
        gated: bool = False,
    ) -> ExpertLinear:
        packed = [linear(tensors, format, bias, gated=gated) for tensors, bias in experts]
        assert len(packed) == num_experts
        return ListedExperts(packed, out_features // 2 if gated else out_features)

    return replace(
        reference_kernels(torch.device("cpu"), torch.float32),
        name="native",
        embedding_dtype=dtype,
        kv_dtype=dtype,
        linear=linear,
        expert_linear=pack_experts,
        route=native.NativeRoute(team.library),
        run_experts=native.NativeRunExperts(team),
        packs=native.NATIVE_FORMATS,
        keeps_narrow=True,
        gather=native.NativeGather(team.library),
        choose=native.NativeChoose(team),
        most_likely=native.NativeMostLikely(team),
        team=team,
    )


def _unheard(_: str) -> None: ...


def triton_kernels(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, limits: LoadOptions, say: Say = _unheard
) -> Kernels:
    """Returns Triton's kernels between the linear maps, and for quantized maps; cuBLAS has the others.

    Nothing waits for the device, so that graphs can hold it. It allocates nothing but its workspace, the kernels'
    results, and unpacked weights for large steps; no batch may have more sequences than the limits say. A CPU device is
    for tests, where Triton interprets.

    Raises:
        ImportError: there is no triton here.
    """
    # Not above: the package is there without triton, too.
    from penstock.engine.kernels.triton import (
        activation,
        attention,
        experts,
        inputs,
        latents,
        norms,
        rotary,
        routing,
        sampling,
        states,
    )
    from penstock.engine.kernels.triton.tiles import Card

    workspaces = {
        shape: attention.Workspace(
            shape,
            dtype,
            max(own.num_heads for own in layers.values()),
            limits.max_num_seqs,
            device,
            windows={own.reach for own in layers.values()},
            max_decode_queries=limits.max_query_len,
            is_quantized=limits.kv_dtype in QUANTIZED,
        )
        for shape, layers in _by_shape(model, limits).items()
    }
    return replace(
        reference_kernels(device, dtype, dtype),
        name="triton",
        kv_dtype=QUANTIZED.get(limits.kv_dtype, dtype),
        rms_norm=norms.rms_norm,
        layer_norm=norms.layer_norm,
        add_rms_norm=norms.add_rms_norm,
        kv_places=rotary.kv_places,
        rotate_and_write=rotary.rotate_and_write,
        rotate_and_write_latents=latents.rotate_and_write_latents,
        linear=_triton_linear(device, dtype, say),
        packs=PACKED_FORMATS,
        glu=activation.glu,
        activated=activation.activated,
        route=routing.route,
        run_experts=experts.TritonExperts(Card.of(device)),
        expert_linear=_triton_experts(device, dtype, say),
        gated_delta=states.gated_delta,
        mamba2=states.mamba2,
        short_conv=states.short_conv,
        attention=lambda batch, shape: attention.TritonAttention(batch, shape, workspaces[shape]),
        gather=inputs.gather,
        choose=sampling.TritonChoose(limits.max_rows, model.vocab_size, device),
        is_static=True,
    )


def _by_shape(
    model: ModelConfig, limits: LoadOptions
) -> dict[KVShape, dict[int, Attention | LatentAttention]]:
    """The attention of all layers by its number, apart for each shape of caches."""
    found: dict[KVShape, dict[int, Attention | LatentAttention]] = {}
    places = KVLayout.of(model, limits.block_size).places
    for number, attention in model.spec.attentions.items():
        found.setdefault(places[number].shape, {})[number] = attention
    return found


class _Kinds:
    """Kinds of weights, and whether the Triton product of each runs here: the first weight of a kind is tried."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._runs: dict[Hashable, bool] = {}

    def runs(self, kind: Hashable, trial: Trial, what: str, instead: str) -> bool:
        if kind not in self._runs:
            error = _failure(trial)
            if error is not None:
                self._say(f"the Triton product {what} does not run here ({_reason(error)}); {instead}")
            self._runs[kind] = error is None
        return self._runs[kind]


def _triton_linear(device: torch.device, dtype: torch.dtype, say: Say) -> LinearPacker:
    """Packs linear maps: quantized weights for Triton, or for torch where Triton's product of their kind fails.

    The first map of each kind is tried with some rows of every number that has tiles of its own.
    """
    from penstock.engine.kernels.triton import packed_linear
    from penstock.engine.kernels.triton.boundaries import few_key
    from penstock.engine.kernels.triton.few_rows import FewRowsLinear
    from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card

    plain, card = reference_kernels(device, dtype, dtype).linear, Card.of(device)
    few = card.boundary(few_key(dtype), 0)
    choose = packed_linear.LinearChooser(card, packed_linear.multiplies_float8(device, dtype))
    kinds = _Kinds(say)

    def linear(tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False) -> Linear:
        if not isinstance(format, PACKED_FORMATS):
            dense = plain(tensors, format, bias, gated=gated)
            if few > 1 and isinstance(dense, DenseLinear):
                return FewRowsLinear(dense.weight, dense.bias, few)
            return dense
        moved = None if bias is None else bias.to(device, dtype)
        chosen = choose(pack(tensors, format, device), moved)

        def trial() -> None:
            for rows in (1, *(most + 1 for most in ROW_CLASSES)):
                chosen(torch.zeros(rows, chosen.weight.in_features, device=device, dtype=dtype))

        what, instead = f"with {chosen.weight.code.value}", "plain torch serves instead, many times slower"
        runs = kinds.runs(chosen.kind, trial, what, instead)
        return chosen if runs else UnpackedLinear(chosen.weight, moved)

    return linear


def _triton_experts(device: torch.device, dtype: torch.dtype, say: Say) -> ExpertPacker:
    """Packs experts for Triton; experts whose product fails are unpacked to the type of activations.

    The first experts of each kind are tried in every class of rows.
    """
    from penstock.engine.kernels.triton.expert_weights import pack_experts
    from penstock.engine.kernels.triton.experts import TritonExperts
    from penstock.engine.kernels.triton.tiles import Card

    run, kinds = TritonExperts(Card.of(device)), _Kinds(say)
    instead = f"their weights take the memory of {str(dtype).removeprefix('torch.')} instead"

    def expert_linear(
        experts: Iterable[tuple[NamedTensors, Tensor | None]],
        format: Format,
        num_experts: int,
        out_features: int,
        *,
        gated: bool = False,
    ) -> ExpertLinear:
        chosen = pack_experts(experts, format, num_experts, out_features, device, dtype, gated=gated)
        if chosen.code is None:  # in 16 bits they run, as the trials showed
            return chosen
        what = f"of experts in {chosen.code.value}"
        runs = kinds.runs(chosen.kind, lambda: run.try_out(chosen, dtype), what, instead)
        return chosen if runs else chosen.unpacked(dtype)

    return expert_linear


def _with_triton(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, limits: LoadOptions, say: Say
) -> Kernels:
    plain = reference_kernels(device, dtype)
    try:
        kernels = triton_kernels(model, device, dtype, limits, say)
    except Exception as error:  # Triton has errors of its own, and asserts that its parts are there
        say(
            f"no Triton kernels ({_reason(error)}); plain torch serves instead, without CUDA graphs and slower"
        )
        return plain
    return only_what_runs(kernels, plain, trials(kernels, model, limits), say)


def only_what_runs(kernels: Kernels, plain: Kernels, tried: dict[str, Trial], say: Say) -> Kernels:
    """The table with the operations of `plain` in the place of operations that fail when they are tried.

    A kernel may fail where others run: for want of a C compiler, of registers, of shared memory.
    """
    failed: dict[str, object] = {}
    for name, trial in tried.items():
        error = _failure(trial)
        if error is not None:
            failed[name] = getattr(plain, name)
            say(
                f"the Triton kernel {name} does not run here ({_reason(error)}); plain torch serves instead, slower"
            )
    if len(failed) == len(tried):
        return plain
    if "attention" in failed:
        # Plain attention reads whole block tables, of which Triton's gather sets only the used entries.
        failed["gather"] = plain.gather
    is_static = kernels.is_static and not failed.keys() & LOOKING
    if kernels.is_static and not is_static:
        say("so steps run without CUDA graphs")
    return replace(kernels, is_static=is_static, **failed)  # type: ignore[arg-type]


def trials(kernels: Kernels, model: ModelConfig, limits: LoadOptions) -> dict[str, Trial]:
    """A trial of every operation that a table of kernels brings, by name, in the shapes of the model."""
    device, dtype = kernels.device, kernels.activation_dtype
    size = max((shape.head_dim for shape in _by_shape(model, limits)), default=1)
    row = torch.ones(2, 2 * size, device=device, dtype=dtype)
    norm = row[0]
    batch = blank_batch([2], [2], torch.zeros(1, 1, dtype=torch.int32)).to(device)
    table = SequenceTable(1, 1, limits.block_size, device)
    tables = SamplingTables(1, model.vocab_size, 1, 1, device)
    seats = torch.zeros(1, dtype=torch.int32, device=device)
    step = StepTokens(seats, batch.query_starts, batch.token_ids, num_blocks=1, max_query_len=2)
    logits = torch.zeros(1, model.vocab_size, device=device, dtype=dtype)
    return (
        _trials_of_experts(kernels, model)
        | _trials_of_states(kernels, model)
        | {
            "rms_norm": lambda: kernels.rms_norm(row, norm, 1e-6),
            "add_rms_norm": lambda: kernels.add_rms_norm(row, row, norm, 1e-6),
            "layer_norm": lambda: kernels.layer_norm(row, norm, 1e-6),
            "glu": lambda: [kernels.glu(row, activation) for activation in ("silu", "gelu_tanh", "gelu")],
            "activated": lambda: kernels.activated(row, "relu2"),
            "kv_places": lambda: kernels.kv_places(batch, limits.block_size),
        }
        | _trials_of_attention(kernels, model, limits)
        | {
            "gather": lambda: kernels.gather(table, step),
            "choose": lambda: kernels.choose(logits, tables, seats, seats, Filters(), None),
        }
    )


def _trials_of_attention(kernels: Kernels, model: ModelConfig, limits: LoadOptions) -> dict[str, Trial]:
    """A trial of attention, and one of what writes the caches that it reads, of each shape that they have."""
    device, dtype = kernels.device, kernels.activation_dtype
    kv = KVCache(KVLayout.of(model, limits.block_size), 1, kernels.kv_dtype, device)
    shapes = _by_shape(model, limits)
    mixed = [1, PREFILLED]  # a decode, and a prefill, which has a kernel of its own
    tables = torch.zeros(2, -(-PREFILLED // limits.block_size), dtype=torch.int32)
    batch = blank_batch(mixed, mixed, tables).to(device)
    positions = torch.zeros(2, dtype=torch.int32, device=device)

    def write() -> None:
        for shape, layers in shapes.items():
            number, own = next(iter(layers.items()))
            angles = torch.ones(2, own.rotary_size // 2, device=device)
            places, layer_kv = TokenPlaces(positions, positions.long(), angles, angles), kv.layer(number)
            if isinstance(own, LatentAttention):
                queries = torch.ones(2, own.num_heads, own.query_size, device=device, dtype=dtype)
                latents = torch.ones(2, own.head_dim, device=device, dtype=dtype)
                norm = latents[0, : own.latent_size]
                kernels.rotate_and_write_latents(queries, latents, norm, 1e-6, places, layer_kv, shape)
            else:
                width = (own.num_heads + 2 * own.num_kv_heads) * own.head_dim
                qkv = torch.ones(2, width, device=device, dtype=dtype)
                spreads = is_quantized(kernels.kv_dtype)
                kernels.rotate_and_write(qkv, None, None, 1e-6, places, layer_kv, shape, spreads=spreads)

    def attention() -> None:
        for shape, layers in shapes.items():
            attend = kernels.attention(batch, shape)
            for number, own in {own.reach: (number, own) for number, own in layers.items()}.values():
                queries = torch.ones(sum(mixed), own.num_heads, own.head_dim, device=device, dtype=dtype)
                sinks = torch.ones(own.num_heads, device=device) if own.vectors() else None
                attend(queries, kv.layer(number), own.reach, None, 0.0, None, sinks)

    has_latents = any(shape.latent_size for shape in shapes)
    return {f"rotate_and_write{'_latents' * has_latents}": write, "attention": attention}


def _trials_of_experts(kernels: Kernels, model: ModelConfig) -> dict[str, Trial]:
    """A trial of routing, and one of experts with weights in the type of activations, if the model has experts."""
    parts = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)]
    device, dtype, count, size = kernels.device, kernels.activation_dtype, 4, 32

    def packed(num_rows: int, *, gated: bool = False) -> ExpertLinear:
        experts = (({"weight": torch.zeros(num_rows, size)}, None) for _ in range(count))
        return kernels.pack_experts(experts, DENSE, count, num_rows, gated=gated)

    def route() -> None:
        for router in dict.fromkeys(part.router for part in parts):
            kernels.route(torch.zeros(2, router.num_experts, device=device, dtype=dtype), router, None, None)

    def run_experts() -> None:
        down = packed(size)
        for activation in dict.fromkeys(part.activation for part in parts):
            gate_up = packed(size * (1 + activation.is_gated), gated=activation.is_gated)
            for rows in ROWS_OF_EXPERTS:
                ids = torch.zeros(rows, 1, device=device, dtype=torch.int32)
                x, weights = torch.zeros(rows, size, device=device, dtype=dtype), ids.float()
                kernels.run_experts(x, ids, weights, gate_up, down, activation)

    return {"route": route, "run_experts": run_experts} if parts else {}


def _trials_of_states(kernels: Kernels, model: ModelConfig) -> dict[str, Trial]:
    """A trial of each kind of layer with a state that the model has: a draft in place after a replayed row, and a save;
    and a prompt, which has kernels of its own."""
    device, dtype, counts = kernels.device, kernels.activation_dtype, [2, PROMPT_OF_STATES]
    slots = torch.tensor([(1, 1, 1, 1), (0, 0, 0, PROMPT_OF_STATES)], dtype=torch.int32)
    saves = torch.tensor([(0, 1, 2, 0)], dtype=torch.int32)
    step = blank_batch(counts, counts, torch.zeros(2, 1, dtype=torch.int32))
    batch = replace(step, state_slots=slots, state_saves=saves).to(device)

    def run(mixer: StateMixer) -> Tensor:
        place = StatePlace.at(0, mixer, 1)
        cache = StateCache(StateLayout(places={0: place}, num_pending=1, slot_floats=place.end), 3, device)
        tensors = {name: torch.zeros(vector.shape) for name, vector in mixer.vectors().items()}
        tensors |= {name: torch.zeros(norm.size) for name, norm in mixer.norms().items()}
        own = StateVectors(**{name: tensor.to(device) for name, tensor in tensors.items()})
        rows, *gates = (
            torch.zeros(
                sum(counts), sum(rows.count for rows in mixer.maps()[name].rows), device=device, dtype=dtype
            )
            for name in ("into", "gates")
            if name in mixer.maps()
        )
        if isinstance(mixer, GatedDelta):
            return kernels.gated_delta(rows, gates[0], mixer, own, 1e-6, cache.layer(0), batch)
        if isinstance(mixer, Mamba2):
            return kernels.mamba2(rows, mixer, own, 1e-6, cache.layer(0), batch)
        return kernels.short_conv(rows, mixer, own, cache.layer(0), batch)

    names = {GatedDelta: "gated_delta", Mamba2: "mamba2", ShortConv: "short_conv"}
    return {names[type(mixer)]: partial(run, mixer) for mixer in model.spec.states.values()}


def _failure(trial: Trial) -> Exception | None:
    """The error that a trial ends with, which may be any: Triton has errors of its own, and asserts.

    Raises:
        torch.AcceleratorError: the device is lost.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch explains at length why it has no kernel for something
            trial()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error
    return None


def check_native(model: ModelConfig, limits: LoadOptions) -> None:
    """Checks that the native kernels can serve a model.

    Raises:
        NativeUnavailable: they cannot.
    """
    if limits.block_size != native.BLOCK_SIZE:
        raise native.NativeUnavailable(
            f"they have blocks of {native.BLOCK_SIZE} tokens, not {limits.block_size}"
        )
    for attention in model.attentions:
        if attention.head_dim % 8:
            raise native.NativeUnavailable(
                f"they need a head_dim that is a multiple of 8, not {attention.head_dim}"
            )
        if isinstance(attention, LatentAttention) and attention.latent_size % 8:
            raise native.NativeUnavailable(
                f"they need latents that are a multiple of 8, not {attention.latent_size}"
            )
    mixed = (state.history_channels for state in model.spec.states.values())
    if (widest := max(model.hidden_size, model.q_size, *mixed)) > native.MAX_ROW:
        raise native.NativeUnavailable(f"they have room for rows of {native.MAX_ROW} numbers, not {widest}")


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
