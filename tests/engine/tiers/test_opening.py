"""The tiers that an operator asks for, and the lines that say why there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.planning.device import RunnerFacts
from penstock.engine.tiers.opening import TierOptions, digest, open_tiers
from penstock.engine.tiers.tiers import Tiers
from tests.engine.fake_runner import FakeRunner
from tests.engine.tiers.fake_carrier import FakeCarrier, FakeStateCarrier

RUNNER = FakeRunner(8, 4)
FACTS = replace(RUNNER.load(), carrier=FakeCarrier(RUNNER))


def opened(options: TierOptions, facts: RunnerFacts = FACTS) -> Tiers | None:
    return open_tiers(options, facts, lambda *_: 0.0, lambda: None)


def test_the_nearest_is_asked_first(tmp_path: Path) -> None:
    options = TierOptions(weights="w", host_bytes=1_000, disk=tmp_path / "new" / "kv", disk_bytes=1_000)
    tiers = opened(options)
    assert tiers is not None
    assert [tier.name for tier in tiers.chain.tiers] == ["host", "disk"]
    assert [tier.stats().max_bytes for tier in tiers.chain.tiers] == [1_000, 1_000]
    tiers.close(10.0)


def test_none_are_opened_unasked() -> None:
    assert opened(TierOptions(weights="w")) is None


def test_a_folder_that_cannot_be_used_leaves_the_other_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").write_text("")
    tiers = opened(TierOptions(weights="w", host_bytes=1_000, disk=tmp_path, disk_bytes=1_000))
    assert tiers is not None
    assert [tier.name for tier in tiers.chain.tiers] == ["host"]
    tiers.close(10.0)
    assert opened(TierOptions(weights="w", disk=tmp_path, disk_bytes=1_000)) is None
    assert caplog.text.count("no KV blocks on disk") == 2


def test_a_model_whose_blocks_cannot_be_carried_goes_without(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(TierOptions(weights="w", host_bytes=1), replace(FACTS, carrier=None)) is None
    assert "a model in several processes" in caplog.text


def test_a_model_with_states_has_tiers_but_no_peers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    facts = replace(FACTS, num_states=4, state_carrier=FakeStateCarrier(RUNNER))
    tiers = opened(TierOptions(weights="w", host_bytes=1_000, peer_headers={}), facts)
    assert tiers is not None
    assert [tier.name for tier in tiers.chain.tiers] == ["host"]
    assert tiers.peers is None
    tiers.close(10.0)
    assert opened(TierOptions(weights="w", peer_headers={}), facts) is None
    assert "layers keep a state" in caplog.text


def test_other_weights_and_layouts_have_other_digests() -> None:
    digests = [
        digest(TierOptions(weights=weights), layout) for weights in ("w", "x") for layout in ("a", "b")
    ]
    assert len({*digests}) == 4
