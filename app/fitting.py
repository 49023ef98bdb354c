"""`penstock doctor MODEL`: what a model takes on this machine and whether it fits, before any of it is loaded."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from penstock.app.build import load_options
from penstock.app.checkpoint import DEMO_NAME, asked_for, find_checkpoint, is_hub_id
from penstock.app.doctor import Severity, check_compiler
from penstock.app.errors import OperatorError
from penstock.app.hub import fetched_before, look_at
from penstock.app.settings import Settings, choices, flag
from penstock.app.tables import table
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.sizes import size_text
from penstock.engine.spec import Experts

if TYPE_CHECKING:
    from penstock.app.estimate import Estimate
    from penstock.engine.execution.memory import Budget
    from penstock.engine.model.prediction import PredictionSource
    from penstock.engine.model.safetensors import TensorFiles
    from penstock.engine.model.tensors import Recipe

CONTEXTS = (2048, 8192, 32768)
"""The lengths of streams in the table, in addition to the model's longest."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is looked at."""

    name: str | None
    """The value of --model; None is the demo model."""
    config: ModelConfig
    stored_as: str
    """The types of its weights in the checkpoint."""
    types: Counter[str]
    """The number of the checkpoint's tensors of each type, as its headers name it."""
    place: str
    """The model's place, and the size of a download that it would need."""
    prediction: PredictionSource | None = None
    """Its own layer that drafts."""
    no_prediction: str = ""
    """The fault of the drafting layer that its config announces."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way to serve the model, and what it takes."""

    options: LoadOptions
    sizes: Estimate

    @property
    def fits(self) -> bool:
        return self.sizes.plan.fits

    @property
    def weights(self) -> str:
        """The type of its linear maps, as the operator asks for it."""
        return self.options.quantize or self.sizes.dtype


@dataclass(frozen=True, slots=True)
class Fitting:
    """A model, and the memory that it is to fit into."""

    config: ModelConfig
    limits: Budget
    has_native: bool
    prediction: PredictionSource | None = None

    def case(self, options: LoadOptions) -> Case:
        """
        Raises:
            CheckpointError: the model cannot be served with these options.
        """
        from penstock.app.estimate import estimate

        sizes = estimate(
            self.config, options, self.limits, has_native=self.has_native, prediction=self.prediction
        )
        return Case(options, sizes)

    def cases(self, ways: Iterable[LoadOptions]) -> list[Case]:
        """A case for each of the ways that can be served, each once."""
        found: dict[tuple[str, str], Case] = {}
        for options in ways:
            with suppress(CheckpointError):
                case = self.case(options)
                found.setdefault((case.weights, case.sizes.kv_dtype), case)
        return list(found.values())


def run(model: str, settings: Settings, flags: Mapping[str, str]) -> int:
    """Prints what a model takes and what would be chosen; 1 if it does not fit in any way.

    Args:
        model: a folder, a GGUF file, a hub id, or the name of the demo model.
        flags: what was given on the command line, by the names of settings.

    Raises:
        OperatorError: there is no such model, or it cannot be served.
    """
    try:
        from penstock.engine.execution.memory import budget
        from penstock.engine.model.dtype import choose_device
    except (ImportError, OSError) as error:
        raise OperatorError(f"torch cannot be imported ({error}); `penstock doctor` says more") from None
    options = load_options(settings)
    try:
        subject = examine(asked_for(model), settings.revision, options)
        limits = budget(choose_device(options.device), options)
        has_native = check_compiler().level is Severity.OK
        fitting = Fitting(subject.config, limits, has_native, subject.prediction)
        tried = fitting.cases(ladder(options, subject.config)) or [fitting.case(options)]
    except CheckpointError as error:
        raise OperatorError(str(error)) from None
    choice = next((case for case in tried if case.fits), None)
    shown = choice or min(tried, key=lambda case: case.sizes.plan.needed)
    print("\n".join([*_head(subject, fitting, shown), "", *_tables(fitting, shown), ""]))
    if choice is None:
        print(_does_not_fit(shown, options))
        return 1
    print("\n".join(_fits(choice, subject, options, flags)))
    return 0


def examine(model: str | None, revision: str | None, options: LoadOptions) -> Subject:
    """Reads the config of a model, and compares it with the headers of its weights.

    Args:
        model: None is the demo model.
        revision: on the hub; None is the newest.

    Raises:
        OperatorError: there is no such model.
        CheckpointError: it is broken or not supported.
    """
    from penstock.engine.model.checkpoint import read_config
    from penstock.engine.model.files import open_files
    from penstock.engine.model.prediction import find_prediction
    from penstock.engine.model.quantize_cache import Checkpoint
    from penstock.engine.model.stacks import unstacked
    from penstock.engine.model.tensors import check_tensors, make_recipe

    files: TensorFiles
    if model is not None and is_hub_id(model) and not _is_fetched(model, revision):
        remote = look_at(model, revision)
        folder, files = remote.folder, remote.files
        place = f"on the hub, {size_text(remote.num_bytes)} to fetch"
    else:
        folder = find_checkpoint(model, revision)
        files, place = open_files(folder), str(folder)
    config = read_config(folder)
    one_by_one = unstacked(files, config)
    recipe = make_recipe(config, replace(options, quantize=None), one_by_one)
    check_tensors(config, one_by_one, recipe)
    types = Counter(entry.dtype for entry in files.entries.values())
    found = Subject(model, config, _stored_as(config, recipe), types, place)
    try:
        return replace(found, prediction=find_prediction(Checkpoint(config, one_by_one, recipe)))
    except CheckpointError as error:
        return replace(found, no_prediction=str(error))


def ladder(asked: LoadOptions, config: ModelConfig) -> Iterator[LoadOptions]:
    """Yields what was asked for, then what takes less and less, where that was left open."""
    may_quantize = asked.quantize is None and config.quantization is None
    quantizations = (asked.quantize, *(choices("quantize") if may_quantize else ()))
    kv_dtypes = ("auto", "int8") if asked.kv_dtype == "auto" else (asked.kv_dtype,)
    for kv_dtype in kv_dtypes:
        for quantize in quantizations:
            yield replace(asked, quantize=quantize, kv_dtype=kv_dtype)


def _is_fetched(hub_id: str, revision: str | None) -> bool:
    """Returns whether an earlier start has fetched all of a model."""
    from penstock.engine.model.safetensors import TensorFiles

    folder = fetched_before(hub_id, revision)
    try:
        return folder is not None and bool(TensorFiles(folder).entries)
    except CheckpointError:
        return False


def _stored_as(config: ModelConfig, recipe: Recipe) -> str:
    """The types of a checkpoint's weights."""
    from penstock.engine.model.tensors import layer_specs

    if config.quantization is None:
        return config.dtype
    names = dict.fromkeys(part.storage.name for spec in layer_specs(config, recipe) for part in spec.parts)
    return f"{config.quantization.text('quant_method')} ({', '.join(names)})"


def _head(subject: Subject, fitting: Fitting, shown: Case) -> Iterator[str]:
    import torch

    from penstock.engine.model.tensors import expected_shapes

    config, limits, options = subject.config, fitting.limits, shown.options
    millions = sum(map(prod, expected_shapes(config).values())) / 1e6
    yield (
        f"model   {subject.name or DEMO_NAME}, {config.architecture}, {millions:,.1f} M parameters, "
        f"stored in {subject.stored_as}, {config.max_position:,} positions"
    )
    yield f"from    {subject.place}"
    yield f"types   {', '.join(f'{count} {name}' for name, count in subject.types.most_common())}"
    if (card := limits.card) is not None:
        free = f"{size_text(card.free)} of {size_text(card.total)} are free"
        yield f"device  {torch.cuda.get_device_name()}, {size_text(limits.available)} for the model; {free}"
        return
    yield f"device  cpu, {size_text(limits.available)} for the model"
    if options.kv_bytes is None and options.num_blocks is None:
        most = "" if limits.cap is None else f", at most {size_text(limits.cap)}"
        what = "KV and states" if config.spec.states else "KV"
        yield f"        of what the weights leave, {limits.share:.0%} is for {what}{most}; --kv-memory sets it"
    if not fitting.has_native:
        yield "        no C++ compiler for the native kernels: plain torch serves, in float32"
    if size := shown.sizes.plan.draft:
        yield f"drafts  come from the model's own layer for multi-token prediction, {size_text(size)}"
    elif subject.no_prediction and options.max_drafts and options.own_drafts:
        yield f"drafts  do not come from a layer of its own: {subject.no_prediction}"


def _tables(fitting: Fitting, shown: Case) -> Iterator[str]:
    """Tables of what weights and KV take in each of their types, and of how many streams that leaves room for."""
    config, options = fitting.config, shown.options
    longest = min(config.max_position, options.max_model_len or config.max_position)
    contexts = [*(context for context in CONTEXTS if context < longest), longest]
    head = [f"{'' if i else 'streams of '}{context:,}" for i, context in enumerate(contexts)]

    def streams(case: Case) -> list[str]:
        return [f"{case.sizes.num_streams(context):,}" if case.fits else "-" for context in contexts]

    def mark(name: str, case: Case) -> str:
        is_shown = (case.weights, case.sizes.kv_dtype) == (shown.weights, shown.sizes.kv_dtype)
        return f"{name} *" if is_shown else name

    quantizations = () if config.quantization else choices("quantize")
    ways = [replace(options, dtype=dtype, quantize=None) for dtype in choices("dtype") if dtype != "auto"]
    ways += [replace(options, quantize=quantize) for quantize in quantizations]
    by_weights = sorted(fitting.cases(ways), key=lambda case: -case.sizes.weights)
    rows = [
        [
            mark(case.weights, case),
            size_text(case.sizes.weights),
            _kv(case),
            case.sizes.kv_dtype,
            *streams(case),
        ]
        for case in by_weights
    ]
    yield table(["weights", "size", "KV", "in", *head], rows)
    yield from _experts(fitting, {mark(case.weights, case): case for case in by_weights})
    yield from _reasons(fitting, options, quantizations)
    yield ""
    names = [name for name in choices("kv_dtype") if name not in ("auto", "fp8")]  # fp8 is int8
    ways = [replace(options, kv_dtype=name) for name in names]
    by_kv = sorted(fitting.cases(ways), key=lambda case: -case.sizes.kv_of_a_token)
    rows = [
        [
            mark(case.sizes.kv_dtype, case),
            f"{case.sizes.kv_of_a_token / 1024:,.2f} KiB",
            _kv(case),
            f"{case.sizes.plan.num_tokens:,}" if case.fits else "-",
            *streams(case),
        ]
        for case in by_kv
    ]
    yield table(["KV", "a token", "all", "tokens", *head], rows)
    most = options.max_num_seqs
    if any(case.sizes.num_streams(contexts[0]) == most for case in (*by_weights, *by_kv)):
        yield f"More than {most:,} streams never run at once: --max-num-seqs."
    if shown.fits:
        yield from _states(shown.sizes)


def _states(sizes: Estimate) -> Iterator[str]:
    """Describes the memory of layers with a state, and its effect on how many sequences run at once."""
    plan = sizes.plan
    if plan.num_states:
        slots = f"{size_text(plan.states)} hold {plan.num_states - 1:,} of them"
        yield (
            f"A sequence has {size_text(plan.state)} of states; {slots}, for at most {sizes.most_running:,} sequences "
            "at once, and for prefixes that are found again."
        )


def _experts(fitting: Fitting, cases: Mapping[str, Case]) -> Iterator[str]:
    """Describes the memory of experts in each type, and the speed of one stream bound by memory."""
    parts = (layer.feed_forward for layer in fitting.config.layers)
    routers = [part.router for part in parts if isinstance(part, Experts)]
    if not routers:
        return
    from penstock.app import read_rate

    device = "cpu" if fitting.limits.card is None else "cuda"
    rate = read_rate.read_rate(device, has_native=fitting.has_native)
    yield ""
    yield (
        f"{routers[0].num_experts} experts in {len(routers)} of {fitting.config.num_layers} layers, of which a token "
        f"chooses {routers[0].top_k}; memory is read at {rate / 1e9:,.1f} GB/s, as measured now"
    )
    rows = [
        [
            name,
            size_text(case.sizes.experts),
            size_text(case.sizes.read_by_a_token),
            f"{rate / case.sizes.read_by_a_token:,.1f}" if case.fits else "does not fit",
        ]
        for name, case in cases.items()
    ]
    yield table(["weights", "experts", "a token reads", "tokens a second"], rows)


def _reasons(fitting: Fitting, options: LoadOptions, quantizations: Iterable[str]) -> Iterator[str]:
    """Why the model cannot be served in some quantizations."""
    for quantize in quantizations:
        try:
            fitting.case(replace(options, quantize=quantize))
        except CheckpointError as error:
            yield f"not {quantize}: {error}"


def _kv(case: Case) -> str:
    return size_text(case.sizes.plan.kv) if case.fits else "does not fit"


def _fits(choice: Case, subject: Subject, asked: LoadOptions, flags: Mapping[str, str]) -> Iterator[str]:
    sizes, more = choice.sizes, _differences(choice.options, asked)
    wanted = min(subject.config.max_position, asked.max_model_len or subject.config.max_position)
    of_all = f" of {wanted:,}" if sizes.max_model_len < wanted else ""
    yield (
        f"fits{' with ' + _flags(more) if more else ''}: {choice.weights} weights and {sizes.kv_dtype} KV (*), "
        f"sequences of up to {sizes.max_model_len:,} tokens{of_all}"
    )
    own = ({} if subject.name is None else {"model": subject.name}) | dict(flags) | more
    yield f"  penstock serve {_flags(own)}".rstrip()
    every = {
        "dtype": sizes.dtype,
        "kv_dtype": sizes.kv_dtype,
        "max_model_len": str(sizes.max_model_len),
        "num_blocks": str(sizes.plan.num_blocks),
    }
    own.pop("kv_memory", None)
    yield f"or, with nothing left to chance:\n  penstock serve {_flags(own | every)}"


def _does_not_fit(smallest: Case, asked: LoadOptions) -> str:
    sizes, more = smallest.sizes, _differences(smallest.options, asked)
    plan = sizes.plan
    way = f", even with {_flags(more)}" if more else ""
    states = f"states {size_text(plan.states)} for {sizes.most_running} sequences, " if plan.states else ""
    return (
        f"does not fit: needs {size_text(plan.needed)} of {size_text(plan.available)}{way}\n"
        f"  weights {size_text(plan.weights)}, KV {size_text(plan.kv)} for {plan.num_tokens:,} tokens, "
        f"{states}and {size_text(plan.needed - plan.weights - plan.kv - plan.states)} for the largest step"
    )


def _differences(options: LoadOptions, asked: LoadOptions) -> dict[str, str]:
    """Returns the settings of `options` that differ from those of `asked`."""
    found = {"quantize": options.quantize, "kv_dtype": options.kv_dtype}
    own = {"quantize": asked.quantize, "kv_dtype": asked.kv_dtype}
    return {name: value for name, value in found.items() if value is not None and value != own[name]}


def _flags(values: Mapping[str, str]) -> str:
    """Settings as the command line has them."""
    return " ".join(
        flag(name) if Settings.model_fields[name].annotation is bool else f"{flag(name)} {shlex.quote(value)}"
        for name, value in values.items()
    )
