from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import MAX_DRAFTS
from penstock.engine.execution.runner import LaunchedStep, ModelRunner
from penstock.engine.planning.device import DeviceError, RunnerFacts
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.fake_runner import make_request


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    make_checkpoint("llama", tmp_path)
    return Driver(tmp_path, num_blocks=32)


def test_logits_that_are_not_finite_fail_their_sequence_alone(driver: Driver) -> None:
    model = driver.runner.model
    healthy = model.lm_head

    def break_first_row(hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(hidden)
        logits[0, 3] = torch.nan
        return logits

    object.__setattr__(model, "lm_head", break_first_row)
    driver.queue.put(make_request("bad", [5, 6]), 0.0)
    driver.queue.put(make_request("good", [7, 8]), 0.0)
    driver.step()
    assert driver.outputs["bad", 0][-1].error == "the model's output was not finite"
    assert len(driver.tokens("good")) == 1
    driver.scheduler.sequences.check()


def test_an_accelerator_error_means_the_device_is_lost(driver: Driver) -> None:
    def lost(batch: object) -> torch.Tensor:  # noqa: ARG001
        raise torch.AcceleratorError("illegal memory access")

    object.__setattr__(driver.runner.model, "decoder", lost)
    driver.queue.put(make_request("r", [5]), 0.0)
    with pytest.raises(DeviceError, match="illegal memory access"):
        driver.step()


def test_logprobs_are_those_of_the_untouched_distribution(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.7, seed=3, num_logprobs=4, max_tokens=2, logit_bias={9: 5.0})
    driver.run(Request(request_id="r", prompt_token_ids=(5, 6, 7), sampling=sampling))
    for output in driver.outputs["r", 0]:
        assert output.logprobs is not None
        for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
            assert len(found.top) == 4
            values = [value for _, value in found.top]
            assert values == sorted(values, reverse=True)
            assert found.logprob == pytest.approx(dict(found.top).get(token_id, found.logprob))
            assert found.logprob <= values[0] + 1e-6


def test_a_closed_runner_has_no_model(driver: Driver) -> None:
    driver.runner.close()
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = driver.runner.model


def test_on_a_cpu_plain_steps_alone_run_beside_the_host(driver: Driver) -> None:
    assert driver.facts.carrier is not None
    assert replace(driver.facts, carrier=None) == RunnerFacts(
        num_blocks=32,
        block_size=16,
        max_batch_tokens=64,
        num_ahead=1,
        plain_ahead_s=0.05,
        max_model_len=512,
        max_drafts=MAX_DRAFTS,
        max_rows=64,
        max_scored=64,
    )
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = ModelRunner(lambda: driver.runner.model).steps


@pytest.mark.parametrize(
    ("window", "use", "first", "expected"),
    [(6, True, 0, (6,)), (6, True, 1, (0, 6, 6)), (6, False, 0, (0,))],
)
def test_planning_is_told_the_windows_of_the_block_tables(
    tmp_path: Path, window: int, use: bool, first: int, expected: tuple[int, ...]
) -> None:
    make_checkpoint("qwen2", tmp_path, sliding_window=window, use_sliding_window=use, max_window_layers=first)
    assert Driver(tmp_path, num_blocks=32).facts.windows == expected


def test_a_mask_can_arrive_between_the_pass_and_the_choice(driver: Driver) -> None:
    """All but one token are taken out of the logits of a step whose pass was launched."""
    driver.queue.put(make_request("r", [5, 6]), 0.0)
    plan = driver.scheduler.plan(0.0)
    step = driver.runner.launch(plan)
    assert isinstance(step, LaunchedStep)
    with torch.inference_mode():
        step.logits[:, :17] = step.logits[:, 18:] = -1e9
    step.choose()
    assert step.wait().sampled[0].token_ids == [17]
