from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution import runner
from engine.execution.device_runner import DeviceLimits
from engine.execution.runner import ModelRunner, choose_steps, make_batch
from engine.planning.request import Request, SamplingParams, Sequence
from engine.planning.step import Chunk, DeviceError
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.paper import make_request

shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=8)


@given(shapes)
def test_a_batch_says_what_the_chunks_say(shape: list[tuple[int, int, bool]]) -> None:
    chunks = []
    for i, (start, num_tokens, samples) in enumerate(shape):
        sequence = Sequence(make_request(str(i), [100 * i + k for k in range(start + num_tokens)]))
        sequence.block_table = [i * 10 + k for k in range(9)]
        chunks.append(Chunk(sequence, start, num_tokens, samples))
    batch = make_batch(chunks, 16)
    row = 0
    wanted = []
    for i, chunk in enumerate(chunks):
        end = chunk.start + chunk.num_tokens
        rows = slice(row, row + chunk.num_tokens)
        assert batch.token_ids[rows].tolist() == chunk.sequence.token_ids[chunk.start : end]
        assert batch.positions[rows].tolist() == list(range(chunk.start, end))
        assert batch.query_starts[i].item() == row
        assert batch.context_lens[i].item() == end
        used = -(-end // 16)
        assert batch.block_tables[i, :used].tolist() == chunk.sequence.block_table[:used]
        row += chunk.num_tokens
        wanted += [row - 1] if chunk.samples else []
    assert batch.query_starts[-1].item() == row
    assert batch.sample_rows.tolist() == wanted
    assert batch.max_query_len == max(num_tokens for _, num_tokens, _ in shape)
    tensors = batch.tensors().values()
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    make_checkpoint("llama", tmp_path)
    return Driver(tmp_path, num_blocks=32)


def test_logits_that_are_not_finite_fail_their_sequence_alone(driver: Driver) -> None:
    model = driver.runner.model
    healthy = model.kernels.sample

    def break_first_row(logits: torch.Tensor, batch: object) -> object:
        logits[0, 3] = np.nan
        return healthy(logits, batch)  # type: ignore[arg-type]

    object.__setattr__(model.kernels, "sample", break_first_row)
    driver.queue.put(make_request("bad", [5, 6]), 0.0)
    driver.queue.put(make_request("good", [7, 8]), 0.0)
    driver.step()
    assert driver.outputs["bad", 0][-1].error == "the model's output was not finite"
    assert len(driver.tokens("good")) == 1
    driver.scheduler.check()


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
        _ = driver.runner.num_blocks


@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu_one_step_is_in_flight_with_graphs_as_asked(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(runner, "CudaDevice", lambda device: device)
    monkeypatch.setattr(runner, "DeviceSteps", lambda *args, **_: asked.extend(args))
    model = driver.runner.model
    options = replace(
        model.options, cuda_graphs=graphs, max_num_seqs=9, max_batch_tokens=70, max_model_len=80
    )
    on_gpu = replace(model, device=torch.device("cuda"), options=options)
    choose_steps(on_gpu)
    limits = DeviceLimits(max_num_seqs=9, max_batch_tokens=70, max_model_len=80)
    assert asked == [on_gpu, limits, on_gpu.device if graphs else None]


def test_on_a_cpu_a_step_has_ended_when_its_launch_returns(driver: Driver) -> None:
    assert driver.runner.num_ahead == 0
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = ModelRunner(lambda: driver.runner.model).steps
