"""ModelRunner: the steps of a model, and all that they keep on its device.

The step thread is its only caller; everything of torch happens there, loading included. A launch puts a step on the
device's queue and returns: the inputs out of the device's own table, the layers, the output head, then the choice of
tokens and their way back to the host. Nothing in it waits for the device. Where there are graphs, a step is padded to
one and replayed. A CPU runs the same code: there a step has ended when its launch returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from penstock.engine.execution.buffers import StepBuffers
from penstock.engine.execution.drafter import Drafter, MadeDrafts
from penstock.engine.execution.expert_counts import ExpertCounts
from penstock.engine.execution.facts import facts_of
from penstock.engine.execution.faults import told
from penstock.engine.execution.graphs import (
    CudaDevice,
    Device,
    Ladder,
    capture_all,
    choice_shapes,
    decode_shapes,
    mixed_shapes,
    verifying_shapes,
)
from penstock.engine.execution.in_flight import TokensInFlight
from penstock.engine.execution.landing import Chosen, Landing, Wanted
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.memory import graph_tokens
from penstock.engine.execution.plain_steps import PlainSteps
from penstock.engine.execution.prompt_rows import PromptFindings, PromptRows
from penstock.engine.execution.seats import Placed, Seats, StepShape
from penstock.engine.execution.state_slots import StateBuffers, tell_slots
from penstock.engine.execution.uploads import send_apart
from penstock.engine.execution.verification import SampledRows, Verification
from penstock.engine.kernels.sequence_table import FROM_TABLE
from penstock.engine.model.weights import Progress
from penstock.engine.planning.device import RunnerFacts, StepInFlight
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import OPEN, Chunk, ExpertUse, StepPlan, StepResult
from penstock.engine.program.interpreter import Interpreter
from penstock.engine.sampling.reference import logprobs_of
from penstock.engine.sampling.tables import GRAPH_FILTERS, Filters
from penstock.engine.sizes import size_text

log = logging.getLogger("penstock.engine")

_LARGEST_WARM_UP = 512
"""Tokens; larger steps have no kernels of their own."""


class ModelRunner:
    """Executes plans on the model that `load_model` brings; see `planning.device.Runner`.

    Args:
        progress: shows how far capturing is; it is called with the graphs done and the graphs in all.
        make_device: makes the device that captures graphs; None for a model that is to run without.
        num_ahead: overrides how many steps may be in flight while the next is planned.
    """

    def __init__(
        self,
        load_model: Callable[[], LoadedModel],
        *,
        progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(lambda *_: None),
        make_device: Callable[[LoadedModel], Device | None] | None = None,
        num_ahead: int | None = None,
    ) -> None:
        self._load_model = load_model
        self._progress = progress
        self._make_device = make_device or _cuda_device
        self._num_ahead = num_ahead
        self._steps: Steps | None = None

    @property
    def steps(self) -> Steps:
        if self._steps is None:
            raise RuntimeError("the model is not loaded")
        return self._steps

    @property
    def model(self) -> LoadedModel:
        return self.steps.model

    def load(self) -> RunnerFacts:
        model = self._load_model()
        if model.kernels.team is not None:
            # Little work is left for torch, and a second team of threads would take the first one's cores.
            torch.set_num_threads(1)
        self._steps = Steps(model)
        self._steps.prepare(self._make_device(model), self._progress)
        return facts_of(model, self._num_ahead, runs_plain=self._steps.plain is not None)

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        steps = self.steps
        assert steps.drafter is not None
        if steps.plain is not None:
            steps.plain.drain()
        # A step that is one native call takes its drafts from the host.
        return steps.drafter.draft(plan, may_stay=may_stay and steps.plain is None)

    def launch(self, plan: StepPlan) -> StepInFlight:
        steps = self.steps
        plain = None if steps.plain is None else steps.plain.launch(plan)
        return plain or steps.begin(plan)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        self.steps.forget(sequences)

    def close(self) -> None:
        self._steps = None


class Steps:
    """The steps of one loaded model.

    Args:
        target: if the model is a draft model, the steps of the one that it drafts for: their sequences have the same
            seats, and their tokens are chosen in the same way.
    """

    @torch.inference_mode()
    def __init__(self, model: LoadedModel, target: Steps | None = None) -> None:
        self.model = model
        self.buffers = model.buffers
        self._refused: dict[Sequence, str] = {}
        """Sequences whose parameters the sampler cannot serve, and why."""
        self.seats: Seats = self._new_seats() if target is None else target.seats
        self.plain: PlainSteps | None = None
        if target is None:
            self.plain = PlainSteps.of(model, self.seats)
        self.state_buffers: StateBuffers | None = None
        if model.states is not None and model.buffers is not None:
            self.state_buffers = StateBuffers(model.options.max_num_seqs, model.device)
        self.passes, choices = self._ladders()
        self.choices: dict[Filters, Ladder] = choices if target is None else target.choices
        self.drafter: Drafter | None = None
        self.of_draft: Steps | None = None
        """The steps of the model's draft model."""
        self.of_chain: Steps | None = None
        """The steps of a head after its first."""
        self.in_flight: TokensInFlight | None = None
        """The tokens of the step that was launched last, for a draft model to follow."""
        if model.draft is not None:
            self.of_draft, chain = Steps(model.draft, self), model.draft.chain
            self.of_chain = None if chain is None else Steps(chain, self)
            go_on = None if self.of_chain is None else self.of_chain.launch
            most = model.options.max_batch_tokens
            self.drafter = Drafter(
                model.draft, self.seats, self.of_draft.launch, most, go_on, lambda: self.in_flight
            )

    @torch.inference_mode()
    def prepare(
        self, device: Device | None, progress: Callable[[], AbstractContextManager[Progress]]
    ) -> None:
        """Compiles kernels and allocates memory for first use, and captures graphs if there is a device that can."""
        self._warm_up()
        if device is not None and self.buffers is not None:
            ladders = [self.passes, *self.choices.values()]
            ladders += [steps.passes for steps in (self.of_draft, self.of_chain) if steps is not None]
            with progress() as told:
                num_graphs, num_bytes = capture_all(ladders, device, told, self.model.kernels.ranks)
            memory = self.model.memory
            log.info(
                "%d CUDA graphs took %s, about %s were planned; the GPU has %s in use, and the largest step takes %s",
                num_graphs,
                *map(size_text, (num_bytes, memory.graphs, device.num_bytes_in_use(), memory.workspace)),
            )

    def begin(self, plan: StepPlan) -> StepInFlight:
        """Launches a step of a whole model, or of a stage; one of other ranks' sequences alone if it has no chunks."""
        if not plan.chunks:
            return self.run_for_others(plan)
        return self.launch(plan) if self.model.config.spec.has_head else self.hand_on(plan)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, follow: TokensInFlight | None = None) -> LaunchedStep:
        """Launches a step kernel by kernel, or as a graph; see `planning.device.Runner`.

        Args:
            follow: of a pass of a draft model, the tokens of a step in flight that it reads.
        """
        with self.faults(plan):
            shape = StepShape.of(plan)
            prompts = PromptRows.of(plan, self.model.options.max_rows)
            captured = self._captured(plan, shape) if prompts is None else None
            placed = self.seats.place(plan, captured or shape)
            num_rows, seats = (captured or shape).num_rows, [seat.number for seat in placed.seats]
            made = None if self.drafter is None else self.drafter.take(plan)
            sampled: SampledRows | None = None
            if follow is not None and shape.verifies:
                sampled = follow.put(plan, placed.tokens.token_ids, seats, num_rows, self.model.table)
            elif shape.verifies:
                sampled = verification = Verification(plan, seats, num_rows, self.model.table)
                if made is not None:
                    made.put(plan, placed.tokens.token_ids, verification)
            logits, numbers, found = self._run(plan, captured, placed, sampled, prompts)
            return LaunchedStep(self, plan, placed, captured, sampled, logits, numbers, found, made)

    @torch.inference_mode()
    def hand_on(self, plan: StepPlan) -> HandedOnStep:
        """Launches a step of a stage before the last, and sends its hidden states to the next."""
        model = self.model
        assert model.world is not None
        with self.faults(plan):
            shape = StepShape.of(plan)
            captured = self._captured(plan, shape)
            placed = self.seats.place(plan, captured or shape)
            rows, *_ = self._run(plan, captured, placed)
            # A copy, for the next step writes where graphs leave them.
            model.world.send(rows[: plan.num_tokens].to(model.kernels.activation_dtype, copy=True))
            return HandedOnStep(self.seats, plan, placed)

    @torch.inference_mode()
    def run_for_others(self, plan: StepPlan) -> StepForOthers:
        """Launches a step in which other ranks have sequences and this one has none."""
        assert isinstance(self.model.decoder, Interpreter)
        with self.faults(plan):
            self.model.decoder.run_for_others(plan.rows)
        return StepForOthers(self.model.expert_counts)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.seats.forget(sequence)
            self._refused.pop(sequence, None)
            if self.drafter is not None:
                self.drafter.forget(sequence)

    def wanted(self, plan: StepPlan, sampled: SampledRows | None) -> list[Wanted]:
        """The results that each chunk of a step is to bring; a chunk that does not sample brings none."""
        return [
            Wanted(
                (place,) if sampled is None else sampled.rows_of[place],
                chunk.drafts,
                chunk.num_logprobs,
                chunk.candidates,
                self._refused.get(chunk.sequence),
            )
            for place, chunk in enumerate(plan.chunks)
            if chunk.samples
        ]

    def faults(self, plan: StepPlan) -> AbstractContextManager[None]:
        return told(plan, self.seats, self.model.device)

    def _received(self, num_tokens: int, captured: StepShape | None) -> Tensor | None:
        """[T, hidden] of the stage before, where a graph reads them if one is to run; None in the first stage."""
        model, buffers = self.model, self.buffers
        if model.world is None or model.config.spec.has_embedding:
            return None
        if captured is not None and buffers is not None:
            hidden = buffers.hidden[:num_tokens]
        else:
            size, dtype = (num_tokens, model.config.hidden_size), model.kernels.activation_dtype
            hidden = torch.empty(size, dtype=dtype, device=model.device)
        model.world.receive(hidden)
        return hidden

    def _run(
        self,
        plan: StepPlan,
        captured: StepShape | None,
        placed: Placed,
        sampled: SampledRows | None = None,
        prompts: PromptRows | None = None,
    ) -> tuple[Tensor, Tensor, PromptFindings | None]:
        """Launches a pass after the block copies: logits [S, n], and the output tokens [S] that there are before.

        With drafts, there are logits of all rows that may be sampled. A stage before the last makes hidden states [T,
        hidden] of all rows in their place.
        """
        if placed.copies is not None:
            self.model.copy_blocks(*placed.copies)
            plan.copies = []
        hidden = self._received(plan.num_tokens, captured)
        if captured is None:
            return self._pass(plan, placed, sampled, prompts, hidden)
        return *self._replay(plan, captured, placed, sampled), None

    def _pass(
        self,
        plan: StepPlan,
        placed: Placed,
        sampled: SampledRows | None,
        prompts: PromptRows | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor, PromptFindings | None]:
        """Launches the pass kernel by kernel."""
        model = self.model
        inputs = model.kernels.gather(model.table, placed.tokens)
        inputs.batch.hidden, inputs.batch.rows_by_rank = hidden, plan.rows
        if model.states is not None:
            tell_slots(inputs.batch, plan.chunks)
        if sampled is not None:
            inputs.batch.sample_rows = sampled.rows
        numbers = inputs.numbers if sampled is None else sampled.numbers
        if prompts is None:
            return model.lm_head(model.decoder(inputs.batch)), numbers, None
        normed, found = prompts.run(model, inputs.batch)
        return model.lm_head(normed), numbers, found

    def _captured(self, plan: StepPlan, shape: StepShape) -> StepShape | None:
        """The shape of the graph that serves a step; None if there is none."""
        captured, states = self.passes.covering(shape), self.state_buffers
        has_room = captured is None or states is None or states.hold(captured, plan.chunks)
        return captured if has_room else None

    def _replay(
        self, plan: StepPlan, shape: StepShape, placed: Placed, sampled: SampledRows | None
    ) -> tuple[Tensor, Tensor]:
        buffers = self.buffers
        assert buffers is not None
        buffers.show(shape, placed, sampled)
        if self.state_buffers is not None:
            self.state_buffers.show(plan.chunks)
        self.passes.run(shape)
        num_made = shape.num_rows if self.model.config.spec.has_head else shape.num_tokens
        return buffers.made[:num_made], buffers.numbers[: shape.num_rows]

    def _new_seats(self) -> Seats:
        if not self.model.config.spec.has_head:
            return Seats(self.model.table)
        return Seats(self.model.table, on_seat=self._seat, on_leave=self.model.sampler.release)

    def _ladders(self) -> tuple[Ladder, dict[Filters, Ladder]]:
        options, buffers = self.model.options, self.buffers
        if buffers is None:
            return Ladder(lambda _: None, ()), {}
        most = min(options.max_num_seqs, options.max_batch_tokens)
        shapes = decode_shapes(most)
        if not self.model.is_chain:
            shapes += mixed_shapes(graph_tokens(self.model.config, options), most)
            shapes += verifying_shapes(options.max_rows, most, options.max_query_len)
        return Ladder(partial(self._captured_pass, buffers), shapes), {
            filters: Ladder(partial(self._captured_choice, buffers, filters), choice_shapes(shapes))
            for filters in (GRAPH_FILTERS if self.model.config.spec.has_head else ())
        }

    def _captured_pass(self, buffers: StepBuffers, shape: StepShape) -> None:
        model = self.model
        if shape.is_decode:
            seats = buffers.sample_seats[: shape.num_sequences]
            tokens = self.seats.decode_tokens(seats, model.table.max_blocks)
        else:
            tokens = buffers.step_tokens(shape, model.table.max_blocks)
        inputs = model.kernels.gather(model.table, tokens)
        if self.state_buffers is not None:
            self.state_buffers.give(inputs.batch, shape)
        if shape.verifies:
            inputs.batch.sample_rows = buffers.sample_rows[: shape.num_rows]
        else:
            buffers.numbers[: shape.num_sequences] = inputs.numbers
        if not model.config.spec.has_embedding:
            inputs.batch.hidden = buffers.hidden[: shape.num_tokens]
        rows = model.lm_head(model.decoder(inputs.batch))
        buffers.made[: len(rows)] = rows

    def _captured_choice(self, buffers: StepBuffers, filters: Filters, shape: StepShape) -> None:
        rows = slice(shape.num_rows)
        seats = buffers.sample_seats[rows]
        numbers = buffers.numbers[rows]
        buffers.token_ids[rows] = self.choose(buffers.logits[rows], seats, numbers, None, filters)

    def choose(
        self,
        logits: Tensor,
        seats: Tensor,
        numbers: Tensor,
        masks: Tensor | None,
        filters: Filters,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Token ids [R] of rows of logits as `lm_head` makes them; the table keeps them for the next step."""
        if filters.need_whole_rows:
            logits = self.model.whole(logits)
        token_ids = self.model.sampler.sample(logits, seats, numbers, filters, masks, previous)
        self.model.table.last_tokens[seats.long()] = token_ids
        return token_ids

    def _warm_up(self) -> None:
        """Compiles kernels and allocates memory for first use: steps in block 0, whose content is never read."""
        model = self.model
        longest = min(model.options.max_batch_tokens, model.max_model_len - 1, _LARGEST_WARM_UP)
        lengths = (
            [] if model.device.type == "cpu" else [1 << i for i in range(1, max(0, longest).bit_length())]
        )
        prompt = (0,) * (max(lengths, default=0) + 1)
        sampling = SamplingParams(max_tokens=2)
        sequence = Sequence(Request(request_id="warm-up", prompt_token_ids=prompt, sampling=sampling))
        num_blocks = -(-len(prompt) // model.kv.block_size)
        sequence.block_table = [0] * num_blocks * len(model.kv.layout.windows)
        chunks = [Chunk(sequence, 0, length, samples=False) for length in lengths]
        chunks.append(Chunk(sequence, len(prompt) - 1, 1, samples=True))
        if model.options.max_rows > 1 and model.options.max_drafts:
            chunks.append(Chunk(sequence, 0, 2, samples=True, drafts=[0]))
        for chunk in chunks:
            step = self.begin(StepPlan([chunk], num_tokens=chunk.num_tokens))
            step.choose()
            step.wait()
        if self.drafter is not None:
            open_chunk = Chunk(sequence, len(prompt) - 1, 3, samples=True, drafts=[OPEN, OPEN])
            self.drafter.draft(StepPlan([open_chunk], num_tokens=3), may_stay=False)
        self.forget([sequence])
        for filters in self.choices:
            self.choices[filters].run(StepShape(1, 1, 1, True, 1))

    def _seat(self, seat: int, sequence: Sequence) -> None:
        try:
            self.model.sampler.assign(seat, sequence)
        except ValueError as error:
            self._refused[sequence] = str(error)


@dataclass(eq=False)
class LaunchedStep:
    """A step whose pass was launched; see `planning.device.StepInFlight`."""

    steps: Steps
    plan: StepPlan
    placed: Placed
    captured: StepShape | None
    """The shape of the graph that was replayed, if one was."""
    sampled: SampledRows | None
    """The rows that tokens are chosen from; None if they are the last ones of the sequences."""
    logits: Tensor
    """[S, n] as `lm_head` makes them, or more rows as padding; with drafts, those of the rows that are sampled."""
    numbers: Tensor
    found: PromptFindings | None
    made: MadeDrafts | None = None
    """The drafts that it verifies, if they are on the device alone."""
    experts: ExpertUse | None = field(init=False, default=None)
    token_ids: Tensor = field(init=False)
    """[R] int32, those of `Chosen`; the next step may overwrite them."""
    landing: Landing = field(init=False)

    @torch.inference_mode()
    def choose(self) -> None:
        steps, plan, placed = self.steps, self.plan, self.placed
        with steps.faults(plan):
            wanted = steps.wanted(plan, self.sampled)
            chosen = self._choose(wanted)
            steps.seats.note_launched(plan, placed.seats)
            self.token_ids = chosen.token_ids
            if self.sampled is not None:
                self.sampled.settle(steps.model.table, chosen.token_ids)
            if steps.drafter is not None:
                steps.in_flight = TokensInFlight(plan, chosen.token_ids, self.sampled)
            drafts, counts = None if self.made is None else self.made.put_tokens, steps.model.expert_counts
            self.experts = None if counts is None else counts.take()  # before those of the next step
            self.landing = Landing(steps.model.device, wanted, chosen, self.found, drafts)

    def wait(self) -> StepResult:
        result = self.landing.wait()
        if self.sampled is not None:
            self._note_wrong(result)
        if self.made is not None:
            result.drafting_s = self.made.land(result.made)
        result.experts = self.experts
        return result

    def _note_wrong(self, result: StepResult) -> None:
        """Notes what the table has taken back of sequences with drafts."""
        pairs = zip(self.placed.seats, self.plan.chunks, strict=True)
        sampling = [(seat, len(chunk.drafts)) for seat, chunk in pairs if chunk.samples]
        for (seat, num_drafts), sampled in zip(sampling, result.sampled, strict=True):
            if num_drafts:
                self.steps.seats.note_wrong(seat, num_drafts + 1 - max(1, len(sampled.token_ids)))

    @cached_property
    def _whole_logits(self) -> Tensor:
        return self.steps.model.whole(self.logits)

    def _look_through(
        self, asking: list[int], wanted: list[Wanted]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Finds the most likely tokens, only of the rows that ask for them, as it goes over all their logits.

        Returns:
            A function that makes `Chosen.told` of the token ids [R].
        """
        logits, num = self._whole_logits, max(one.num_logprobs or 0 for one in wanted)
        (rows,) = send_apart([asking], logits.device)
        norms, *top = self.steps.model.kernels.most_likely(logits, rows, num)
        return lambda ids: (logprobs_of(logits, rows, ids.index_select(0, rows), norms), *top)

    def _scores(self, wanted: list[Wanted]) -> list[Tensor]:
        """Makes `Chosen.scores` of the rows that have candidates."""
        scored = [one for one in wanted if one.candidates]
        if not scored:
            return []
        places = [place for place, one in enumerate(scored) for _ in one.candidates]
        candidates = [token_id for one in scored for token_id in one.candidates]
        rows = [one.rows[0] for one in scored]
        logits = self._whole_logits
        rows_, places_, candidates_ = send_apart([rows, places, candidates], logits.device)
        norms, *_ = self.steps.model.kernels.most_likely(logits, rows_, 0)
        return [logprobs_of(logits, rows_[places_], candidates_, norms[places_])]

    def _masks(self, order: ListLike[tuple[int, int]]) -> Tensor | None:
        """[R, words] on the device: the masks of rows, each given by its chunk and how many drafts come before."""
        masks, sampler = self.plan.masks, self.steps.model.sampler
        return None if masks is None else sampler.masks(masks, order)

    def _filters(self) -> Filters:
        return self.steps.model.sampler.filters(
            seat.number for seat, c in zip(self.placed.seats, self.plan.chunks, strict=True) if c.samples
        )

    def _choose(self, wanted: list[Wanted]) -> Chosen:
        """Chooses the tokens of the step's rows, rows after wrong drafts included."""
        sampled = self.sampled
        order = [(i, 0) for i in range(len(self.plan.chunks))] if sampled is None else sampled.order
        # The most likely tokens first: that may find no memory, and a chosen token is counted once.
        asking = [row for one in wanted if one.num_logprobs is not None for row in one.rows]
        tell = self._look_through(asking, wanted) if asking else lambda _: ()
        scores = self._scores(wanted)
        filters, masks = self._filters(), self._masks(order)
        if self.captured is not None and masks is None and filters.is_fused:
            choose = partial(self._choose_by_graph, self.captured.num_rows, filters)
        elif wanted:
            previous = self._previous(len(order)) if filters.marked else None
            choose = partial(self._choose_by_kernels, len(order), filters, masks, previous)
        else:
            return Chosen(self.numbers)
        token_ids = choose(self.placed.sample_seats) if sampled is None else sampled.run(choose)
        return Chosen(token_ids, asking, tell(token_ids), scores)

    def _previous(self, num_rows: int) -> Tensor:
        """[R] int32: the token whose logits each row has, before any of them is chosen."""
        tokens, sampled, last_tokens = self.placed.tokens, self.sampled, self.steps.model.table.last_tokens
        rows = tokens.query_starts[1:] - 1 if sampled is None else sampled.rows
        seats = self.placed.sample_seats if sampled is None else sampled.seats
        token_ids = tokens.token_ids[rows[:num_rows].long()]
        return torch.where(token_ids == FROM_TABLE, last_tokens[seats[:num_rows].long()], token_ids)

    def _choose_by_kernels(
        self, num_rows: int, filters: Filters, masks: Tensor | None, previous: Tensor | None, seats: Tensor
    ) -> Tensor:
        rows = slice(num_rows)
        logits, numbers = self.logits[rows], self.numbers[rows]
        return self.steps.choose(logits, seats[rows], numbers, masks, filters, previous)

    def _choose_by_graph(self, num_rows: int, filters: Filters, seats: Tensor) -> Tensor:
        steps, buffers = self.steps, self.steps.buffers
        assert buffers is not None
        buffers.show_seats(seats)
        shape = StepShape(num_rows, num_rows, 1, True, num_rows)
        steps.choices[Filters(filters.top_k, filters.top_p)].run(shape)
        return buffers.token_ids[:num_rows]


class HandedOnStep:
    """A step of a stage before the last: the hidden states are on their way to the next one; see
    `planning.device.StepInFlight`."""

    def __init__(self, seats: Seats, plan: StepPlan, placed: Placed) -> None:
        self._seats, self._plan, self._placed = seats, plan, placed

    def choose(self) -> None:
        """Its tokens are chosen by the last stage."""
        self._seats.note_handed_on(self._plan, self._placed.seats)

    def wait(self) -> StepResult:
        """Brings nothing: the last stage has the results."""
        return StepResult([])


class StepForOthers:
    """A step in which this rank has run its experts for the sequences of others; see `planning.device.StepInFlight`."""

    def __init__(self, counts: ExpertCounts | None) -> None:
        self._experts = None if counts is None else counts.take()

    def choose(self) -> None:
        """Its tokens are chosen elsewhere."""

    def wait(self) -> StepResult:
        return StepResult([], experts=self._experts)


def _cuda_device(model: LoadedModel) -> Device | None:
    return CudaDevice(model.device) if model.buffers is not None and model.device.type == "cuda" else None
