"""With a step planned while the one before is in flight, as on a GPU, constrained answers are the same."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.config import LoadOptions
from penstock.engine.engine import Engine
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Output
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.grammars import Grammars
from penstock.priority.queue import LaneQueue
from tests.engine.driver import compiled
from tests.engine.grammars.test_answers import CONFIG, MIXTURE, TOKENIZER, alone, driver

__all__ = ["alone", "driver"]

PATIENCE_S = 60.0
Answers = dict[tuple[str, int], list[Output]]


class EngineRun:
    """An engine whose runner goes ahead by one step, and all that it delivered."""

    def __init__(self, max_drafts: int, num_ahead: int) -> None:
        options = LoadOptions(device="cpu", dtype="float32", num_blocks=256, max_drafts=max_drafts)
        self.queue = LaneQueue(threading.Lock())
        self.answers: Answers = defaultdict(list)
        self.num_ended = 0
        self.grammars = Grammars(TOKENIZER, CONFIG.eos_token_ids)
        self.ended = threading.Condition()
        self.engine = Engine(
            lambda: ModelRunner(
                lambda: load_model(DEMO_MODEL, options, lambda _: None, lambda *_: None), num_ahead=num_ahead
            ),
            self.queue,
            TextSink(TOKENIZER, CONFIG.eos_token_ids),
            SchedulerLimits(max_batch_tokens=64, max_num_seqs=8, max_model_len=512),
            deliver=self.deliver,
            clock=time.monotonic,
            grammars=self.grammars,
        )

    def deliver(self, report: StepReport) -> None:
        with self.ended:
            for output in report.outputs:
                self.answers[output.request_id, output.index].append(output)
                self.num_ended += output.finish_reason is not None
            self.ended.notify_all()


@pytest.fixture(params=[(0, 1), (8, 0)], ids=["ahead", "with drafts"])
def run(request: pytest.FixtureRequest) -> Iterator[EngineRun]:
    run = EngineRun(*request.param)
    yield run
    assert run.engine.stop(PATIENCE_S)


def test_the_same_answers(run: EngineRun, alone: dict[tuple[str, int], list[object]]) -> None:
    for one in MIXTURE:
        run.queue.put(compiled(one, run.grammars), 0.0)
    run.engine.start()
    with run.ended:
        assert run.ended.wait_for(lambda: run.num_ended == len(alone), PATIENCE_S)
    told = {
        key: [(output.token_ids, output.text, output.logprobs, output.finish_reason) for output in outputs]
        for key, outputs in run.answers.items()
    }
    assert told == alone
