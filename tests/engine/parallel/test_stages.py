"""Models cut into stages over gloo, with as many steps in flight, against the same models in one process."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.stages import check_stages, cut_config
from penstock.engine.planning.device import DeviceError
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, STATES, TINY
from tests.engine.parallel.comparing import (
    SHARED,
    Pool,
    ask,
    checkpoint,
    compare,
    embedding,
    guided,
    prompt,
)

FEW = {"Gemma 3", "Qwen 3.5"}
"""Those with windows and those with states, of which not every stage has both kinds of layers."""
FAMILIES = TINY | SPARSE | STATES


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_stages_choose_the_tokens_of_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    """One of the models has tied embeddings, which both stages have."""
    compare(pool.of(1, 2), checkpoint(name, tmp_path))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FEW else pytest.mark.long("families in two stages"))
        for family in FAMILIES
    ],
)
def test_two_stages_serve_every_family(pool: Pool, family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family].make(tmp_path, vocab_size=517)
    if family == "Gemma 4 E":
        with pytest.raises(CheckpointError, match="layers have embeddings of their own, which are not cut"):
            check_stages(folder, read_config(folder), 2)
        return
    compare(pool.of(1, 2), folder)


def test_two_stages_follow_a_grammar(pool: Pool) -> None:
    assert guided(pool.of(1, 2)) == guided(None)


def test_the_last_stage_pools_prompts(pool: Pool, tmp_path: Path) -> None:
    folder = checkpoint("qwen2", tmp_path)
    assert embedding(folder, pool.of(1, 2)) == pytest.approx(embedding(folder, None), abs=1e-4)


def test_each_stage_has_a_step_of_other_sequences(pool: Pool, tmp_path: Path) -> None:
    """Of five that decode, three are in one step and two in the other; one never waits for another's."""
    driver = Driver(checkpoint("mistral", tmp_path), num_blocks=60, followers=pool.of(1, 2))
    for number in range(5):
        driver.queue.put(ask(f"{number}", prompt(number, 4), max_tokens=12), 0.0)
    sizes = list[int]()
    while not driver.scheduler.sequences.is_idle or any(driver.queue.depths().values()):
        plan = driver.step()
        in_flight = [chunk.sequence for plan, _ in driver.flights for chunk in plan.chunks]
        assert len(in_flight) == len(set(in_flight))
        sizes.append(len(plan.chunks))
    assert sizes[:2] == [5, 0], "the prompts, and nobody is left"
    assert sizes[2:13] == [3, 2] * 5 + [3]


def test_the_chunks_of_a_prompt_do_not_wait_for_each_other(pool: Pool, tmp_path: Path) -> None:
    driver = Driver(checkpoint("mistral", tmp_path), num_blocks=60, followers=pool.of(1, 2))
    driver.fresh(budget=16)
    driver.queue.put(ask("r", prompt(8, 60), max_tokens=1), 0.0)
    assert [driver.step().num_tokens for _ in range(4)] == [16, 16, 16, 12]
    assert driver.step().num_tokens == 0


@pytest.mark.long("two stages of two ranks")
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not name.startswith(("Gemma 4 E", "OLMo", "MiniMax"))]
)
def test_two_stages_of_two_ranks_serve_every_family(pool: Pool, family: str, tmp_path: Path) -> None:
    """Every family that is refused neither by stages nor by ranks."""
    compare(pool.of(2, 2), FAMILIES[family].make(tmp_path, vocab_size=517))


def test_the_first_stage_need_not_have_the_states(pool: Pool, tmp_path: Path) -> None:
    """Planning has the slots of the others."""
    kinds = ["full_attention"] * 2 + ["conv"] * 2
    folder = FAMILIES["LFM2"].make(tmp_path, vocab_size=517, layer_types=kinds, num_hidden_layers=4)
    first = cut_config(read_config(folder), 2, 0).spec
    assert first.attentions
    assert not first.states
    compare(pool.of(1, 2), folder)


@pytest.mark.long("more than two stages")
def test_three_stages_choose_them_too(pool: Pool, tmp_path: Path) -> None:
    compare(pool.of(1, 3), checkpoint("llama", tmp_path, num_hidden_layers=4))


@pytest.mark.long("more than two stages")
def test_a_stage_may_have_neither_attention_nor_a_state(pool: Pool, tmp_path: Path) -> None:
    """Each of five has one layer: two have a state, one attention, one experts, one a feed-forward part alone."""
    compare(pool.of(1, 5), FAMILIES["Nemotron 3"].make(tmp_path, vocab_size=517))


@pytest.mark.parametrize(
    ("num_stages", "rank"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.long("more than two stages"))]
)
def test_a_stage_that_is_killed_ends_the_steps_at_once(
    pool: Pool, num_stages: int, rank: int, tmp_path: Path
) -> None:
    """At some moment between two steps, or within one; and an idle engine is told, too."""
    followers = pool.of(1, num_stages)
    driver = Driver(checkpoint("mistral", tmp_path, num_hidden_layers=3), num_blocks=60, followers=followers)
    killer = threading.Timer(random.uniform(0, 0.2), os.kill, (followers.pids[rank], signal.SIGKILL))

    def kill(step: int) -> None:
        if step == 2:
            killer.start()
        if step == 100:
            killer.join()

    said = r"^rank \d \(process \d+\) ended with"
    with pytest.raises(DeviceError, match=said):
        driver.run(ask("long", SHARED, max_tokens=400), before_step=kill)
    with pytest.raises(DeviceError, match=said):
        driver.runs.forget([])
    pool.close()
