"""States of recurrent layers that go to the tiers and come back, one case at a time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.planning.outside import STATE
from penstock.engine.planning.prefix_index import PRIVATE, prompt_hashes
from penstock.engine.planning.request import Output
from penstock.engine.tiers.block_file import BlockKey
from tests.engine.fake_runner import make_request
from tests.engine.tiers.test_tiers import BLOCK_SIZE, PROMPT, ForgetfulTier, Server, keys

STEM = PROMPT[:16]


class LastingTier(ForgetfulTier):
    """Outlives its server."""

    def close(self) -> None:
        pass


def stopped(prompt: list[int] = PROMPT, **options: Any) -> Server:
    """A server that has stopped after one prompt; its tier has all of it."""
    server = Server(num_blocks=40, num_states=9, tier=LastingTier(), **options)
    server.run("first", prompt)
    server.tiers.finish()
    return server


def started_again(server: Server, **options: Any) -> Server:
    return Server(num_blocks=40, num_states=9, tier=server.tier, **options)


def state_key(prompt: list[int], num_tokens: int, salt: bytes = b"") -> BlockKey:
    return BlockKey(prompt_hashes(prompt, BLOCK_SIZE, salt)[num_tokens // BLOCK_SIZE - 1], STATE)


def found(output: Output) -> tuple[int, int]:
    """The tokens of the prompt that were cached, and those of them that were brought back."""
    assert output.timings is not None
    return output.timings.num_cached_tokens, output.timings.num_fetched_tokens


def states_in(server: Server) -> int:
    return sum(key.is_state for key in server.tier._blocks)


def test_what_was_evicted_comes_back_with_a_state() -> None:
    server = Server(num_states=5)
    server.run("first", PROMPT)
    assert states_in(server) == 0, "nothing is in danger"
    server.evict()
    assert server.tier.has(state_key(PROMPT, 16))
    assert found(server.run("again", PROMPT)) == (16, 16)
    assert server.tiers.use.num_fetched_blocks == 5
    assert found(server.run("once more", PROMPT))[1] == 0


def test_a_state_alone_comes_back_to_blocks_that_stayed() -> None:
    server = Server(num_blocks=200, num_states=4)
    server.run("first", PROMPT)
    for number in range(3):
        server.run(f"other {number}", [30 + number, *range(19)])
    assert server.carrier.num_out == 0
    assert server.memory.snapshots.has_state(state_key(PROMPT, 16).hash) is False
    assert found(server.run("again", PROMPT)) == (16, 16)
    assert server.tiers.use.num_fetched_blocks == 1


def test_a_state_that_was_found_twice_is_kept_before_it_makes_way() -> None:
    server = Server(num_blocks=200, num_states=20)
    server.run("first", PROMPT)
    assert states_in(server) == 0
    server.run("again", PROMPT)
    assert server.tier.has(state_key(PROMPT, 16))


def test_a_turn_that_goes_on_from_the_end_of_another_has_its_state_kept() -> None:
    """The end of a turn is within a block; what is kept is the state before, at the end of one."""
    server = Server(num_blocks=200, num_states=20)
    server.run("first", PROMPT)
    turn = [*PROMPT, *(token for output in server.outputs for token in output.token_ids), 7, 8, 9]
    assert found(server.run("then", turn))[0] > 16
    assert server.tier.has(state_key(PROMPT, 16))


@pytest.mark.parametrize("num_more", [1, 4, 30])
def test_a_restarted_server_goes_on_from_the_state(num_more: int) -> None:
    server = stopped()
    again = started_again(server)
    assert found(again.run("again", [*STEM, *range(40, 40 + num_more)])) == (16, 16)


def test_blocks_without_a_state_after_any_of_them_are_left_where_they_are() -> None:
    server = stopped()
    again = started_again(server)
    assert found(again.run("again", [*PROMPT[:14], *range(40, 46)])) == (0, 0)
    assert again.carrier.num_in == 0


def test_the_deepest_state_of_a_chain_is_read() -> None:
    server = Server(num_blocks=40, num_states=20, tier=LastingTier())
    server.run("short", PROMPT[:9])
    server.run("long", PROMPT)
    server.tiers.finish()
    assert states_in(server) >= 2
    again = started_again(server)
    assert found(again.run("long", PROMPT)) == (16, 16)
    assert states_in(again) == states_in(server)
    anew = started_again(server)
    assert found(anew.run("other", [*PROMPT[:12], *range(40, 48)])) == (8, 8)


@pytest.mark.parametrize("missing", [*keys(PROMPT), state_key(PROMPT, 16)], ids=lambda key: key.text[-7:])
def test_nothing_is_used_if_a_part_cannot_be_read(missing: BlockKey) -> None:
    server = stopped()
    again = started_again(server)
    again.tier.missing = {missing}
    assert found(again.run("again", PROMPT)) == (0, 0)
    assert len(again.memory.snapshots) > 0
    assert not again.memory.index.num_pending
    assert again.tiers.now_s == 0.0, "nobody waits for what does not come"


def test_who_waits_goes_on_without_a_state_that_is_late() -> None:
    server = stopped()
    again = started_again(server)
    again.submit("again", PROMPT)
    assert again.step() == again.step() == 0, "it waits"
    again.tiers.read_some(4)  # of four blocks and a state
    assert again.step() == 0
    again.tiers.now_s += 3.0
    assert again.step() > 0
    again.finish()
    assert not again.memory.index.num_pending


def test_those_in_the_queue_are_read_for() -> None:
    server = stopped()
    again = started_again(server)
    again.tiers.expect([make_request("hint", PROMPT)])
    again.step()
    again.tiers.read_some()
    again.step()
    assert again.memory.snapshots.has_state(state_key(PROMPT, 16).hash)


def test_a_state_of_a_sequence_that_is_not_trusted_is_gone_everywhere() -> None:
    server = Server(num_blocks=40, num_states=20, tier=LastingTier())
    for name in ("first", "again"):
        server.run(name, PROMPT)
    assert server.tier.has(state_key(PROMPT, 16))
    server.runner.bad.add(("bad", 0))
    server.submit("bad", PROMPT)
    server.finish()
    server.tiers.finish()
    assert states_in(server) == 0
    assert not server.tier.has(keys(PROMPT)[0])


@pytest.mark.parametrize("num_states", [4, 20])
def test_a_private_state_is_kept_nowhere(num_states: int) -> None:
    """Neither when it makes way, nor when it is found twice, nor at the end."""
    server, salt = Server(num_blocks=200, num_states=num_states, tier=LastingTier()), b"tenant" + PRIVATE
    for number in range(4):
        server.submit(f"first {number}", [30 + number // 2, *PROMPT[1:]], salt)
        server.finish()
    assert len(server.memory.snapshots) > 0
    server.tiers.finish()
    assert states_in(server) == 0


def test_the_forecast_counts_a_prompt_up_to_its_state() -> None:
    again = started_again(stopped(), step_seconds=lambda num_prefill, *_: 0.1 * num_prefill)
    hashes = [key.hash for key in keys(PROMPT)]
    assert again.tiers.tokens_gained(hashes, 0) == 16
    assert again.tiers.tokens_gained(hashes[:3], 0) == 0, "there is no state after the third block"
    again.tiers.chain._rates[0].note(1, 0.1, again.tiers.now_s)
    assert again.tiers.tokens_gained(hashes, 0) == 0, (
        "a state takes longer to read than these tokens to compute"
    )


def test_blocks_without_bytes_need_no_tier() -> None:
    """As those of a model without attention: its states are all that there is to keep."""
    server = stopped()
    tier = ForgetfulTier()
    for key, payload in server.tier._blocks.items():
        if key.is_state:
            tier.write(key, payload)
    again = Server(num_states=9, tier=tier)
    again.tiers.chain._blocks_are_empty = True
    hashes = [key.hash for key in keys(PROMPT)]
    assert again.tiers.chain.read(keys(PROMPT)[0]) == b""
    assert again.tiers.chain.keeps(keys(PROMPT)[0])
    assert again.tiers.tokens_gained(hashes, 0) == 16
