"""What goes to the tiers and what comes back, one case at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Lock

import pytest

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_index import PRIVATE, prompt_hashes
from penstock.engine.planning.request import Output, Request
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.setup import make_memory
from penstock.engine.tiers.block_file import BlockKey, Payload
from penstock.engine.tiers.fetching import LEAST_PATIENCE_S
from penstock.engine.tiers.host import HostTier
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, expected_output, make_request
from tests.engine.fake_states import FakeStates
from tests.engine.tiers.fake_carrier import FakeCarrier, HandDrivenTiers

BLOCK_SIZE = 4
PROMPT = [*range(20)]
"""Five blocks, of which the last is not found: it has the token whose logits are needed."""
EVICTING = [*range(30, 55)]


class ForgetfulTier(HostTier):
    """Says that it has blocks which it then cannot bring."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.missing: set[BlockKey] = set()

    def read(self, key: BlockKey) -> Payload | None:
        if key in self.missing:
            self.forget(key)
        return super().read(key)


class Server:
    """A scheduler with a fake device that has room for one prompt, and tiers that the test drives."""

    def __init__(
        self,
        num_blocks: int = 8,
        step_seconds: Callable[[int, int, int, int], float] = lambda *_: 0.0,
        staged_blocks: int = 100,
        num_states: int = 0,
        tier: ForgetfulTier | None = None,
    ) -> None:
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        if num_states:
            self.runner.states = FakeStates(num_states, num_pending=3)
        memory = make_memory(self.runner.load(), prefix_cache=True, log=None)
        assert isinstance(memory, SequenceMemory)
        self.memory = memory
        self.carrier, self.tier = FakeCarrier(self.runner), tier or ForgetfulTier()
        self.tiers = HandDrivenTiers([self.tier], self.carrier, random.Random(1), step_seconds, staged_blocks)
        self.tiers.attach(memory)
        self.queue = LaneQueue(Lock())
        limits = SchedulerLimits(max_batch_tokens=64, max_num_seqs=4, max_model_len=100)
        self.scheduler = Scheduler(self.queue, memory, FakeSink(), limits)
        self.outputs: list[Output] = []

    def submit(self, name: str, prompt: list[int], salt: bytes = b"") -> Request:
        request = make_request(name, prompt, max_tokens=2, salt=salt)
        self.queue.readmit(request, 0.0)
        return request

    def step(self) -> int:
        """Returns how many tokens were computed."""
        self.tiers.turn()
        plan = self.scheduler.plan(0.0)
        self.scheduler.sequences.take_departed()
        if plan.chunks:
            self.tiers.save()
            self.outputs += self.scheduler.commit(plan, self.runner.execute(plan), 0.0)
        return plan.num_tokens

    def finish(self, *, reads: bool = True) -> None:
        for _ in range(100):
            if self.scheduler.sequences.is_idle and not any(self.queue.depths().values()):
                break
            self.step()
            self.tiers.write_some()
            if reads:
                self.tiers.read_some()
        assert self.scheduler.sequences.is_idle
        self.scheduler.sequences.check()

    def run(self, name: str, prompt: list[int]) -> Output:
        """Returns the output that ends a request."""
        request = self.submit(name, prompt)
        self.finish()
        tokens = [token for o in self.outputs if o.request_id == name for token in o.token_ids]
        assert tokens == expected_output(request, 0, 100)
        return next(o for o in self.outputs if o.request_id == name and o.finish_reason)

    def evict(self) -> None:
        """All that the device has makes room for another prompt."""
        self.run("other", EVICTING)


def keys(prompt: list[int]) -> list[BlockKey]:
    return [BlockKey(hash_) for hash_ in prompt_hashes(prompt, BLOCK_SIZE, b"")]


def test_what_was_evicted_comes_back() -> None:
    server = Server()
    server.run("first", PROMPT)
    assert server.carrier.num_out == 0, "nothing is in danger"
    server.evict()
    assert all(server.tier.has(key) for key in keys(PROMPT))
    timings = server.run("again", PROMPT).timings
    assert timings is not None
    assert timings.num_cached_tokens == timings.num_fetched_tokens == 16
    assert server.tiers.use.num_fetched_blocks == 4


def test_what_was_found_twice_is_kept_before_it_is_evicted() -> None:
    server = Server(num_blocks=40)
    server.run("first", PROMPT)
    assert not any(server.tier.has(key) for key in keys(PROMPT))
    server.run("again", PROMPT)
    assert all(server.tier.has(key) for key in keys(PROMPT))
    num_out = server.carrier.num_out
    server.run("and again", PROMPT)
    assert server.carrier.num_out == num_out, "it is copied once"


def test_what_waits_to_be_written_is_bounded() -> None:
    server = Server(staged_blocks=2)
    server.run("first", PROMPT)
    request = server.submit("other", [30 + i for i in range(20)])
    while not any(o.request_id == request.request_id for o in server.outputs):
        server.step()
    assert server.carrier.num_out == 2
    assert server.tiers.use.num_lost_blocks > 0


def waiting(server: Server) -> Server:
    """It waits for a prompt's blocks, which were evicted."""
    server.run("first", PROMPT)
    server.evict()
    server.submit("again", PROMPT)
    assert server.step() == 0
    assert server.step() == 0, "it waits, and nothing is computed"
    return server


def test_a_request_waits_for_what_is_read() -> None:
    server = waiting(Server())
    server.tiers.read_some()
    assert server.step() == 4
    server.finish()
    assert not server.memory.index.num_pending


def test_who_waits_for_a_slow_tier_goes_on_without_it() -> None:
    server = waiting(Server())
    server.tiers.now_s += LEAST_PATIENCE_S + 0.1
    assert server.step() > 8
    server.finish(reads=False)
    server.tiers.read_some()  # now it comes, and nobody wants it
    server.step()
    assert server.tiers.use.num_fetched_blocks == 0
    assert not server.memory.index.num_pending


def test_patience_is_the_time_that_computing_takes() -> None:
    server = waiting(Server(step_seconds=lambda num_prefill, *_: float(num_prefill)))
    server.tiers.now_s += LEAST_PATIENCE_S + 0.1
    assert server.step() == 0, "the blocks would take longer to compute"
    server.tiers.now_s += 20.0
    assert server.step() > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_block_that_cannot_be_read_ends_the_wait_for_those_behind_it(depth: int) -> None:
    server = Server()
    server.run("first", PROMPT)
    server.evict()
    server.tier.missing = {keys(PROMPT)[depth]}
    timings = server.run("again", PROMPT).timings
    assert timings is not None
    assert timings.num_cached_tokens == timings.num_fetched_tokens == 4 * depth
    assert server.tiers.now_s == 0.0


def test_those_in_the_queue_are_read_for() -> None:
    server = Server()
    server.run("first", PROMPT)
    server.evict()
    before = server.tiers.use.num_fetched_blocks
    server.tiers.expect([make_request("hint", PROMPT)])
    server.step()
    server.tiers.read_some()
    server.step()
    assert server.tiers.use.num_fetched_blocks > before
    assert len(server.memory.index.match([key.hash for key in keys(PROMPT)])) == 4


def test_a_chain_is_read_as_it_grows() -> None:
    """Its blocks come into the tier one part after another; the request that comes then finds them on the device."""
    source, server = Server(), Server()
    source.run("first", PROMPT)
    source.evict()
    hint = make_request("hint", PROMPT)
    for part in (keys(PROMPT)[:1], keys(PROMPT)[1:3], keys(PROMPT)[3:]):
        for key in part:
            payload = source.tier.read(key)
            assert payload is not None
            server.tier.write(key, payload)
        server.tiers.expect([hint])
        server.step()
        server.tiers.read_some()
        server.step()
        assert server.memory.num_free_blocks == server.memory.num_blocks, "nothing is held for it"
        assert not server.memory.index.num_pending
    assert len(server.memory.index.match([key.hash for key in keys(PROMPT)])) == 4
    timings = server.run("again", PROMPT).timings
    assert timings is not None
    assert timings.num_cached_tokens == timings.num_fetched_tokens == 16


def test_what_is_distrusted_is_gone_everywhere() -> None:
    server = Server(num_blocks=40)
    server.run("first", PROMPT)
    server.run("again", PROMPT)
    assert all(server.tier.has(key) for key in keys(PROMPT))
    server.runner.bad.add(("bad", 0))
    server.submit("bad", PROMPT)
    server.finish()
    assert not any(server.tier.has(key) for key in keys(PROMPT))


def test_the_forecast_counts_what_is_worth_reading() -> None:
    server = Server(step_seconds=lambda num_prefill, *_: 0.1 * num_prefill)
    server.run("first", PROMPT)
    server.evict()
    hashes = [key.hash for key in keys(PROMPT)]
    num_known = len(server.memory.index.match(hashes))
    num_there = sum(server.tier.has(key) for key in keys(PROMPT)[num_known:])
    assert server.tiers.tokens_gained(hashes, num_known) == 4 * num_there > 0
    server.tiers.chain._rates[0].note(
        server.carrier.num_bytes, 0.1, server.tiers.now_s
    )  # a quarter of computing
    assert server.tiers.tokens_gained(hashes, num_known) == 3 * num_there
    server.tiers.chain._rates[0].note(server.carrier.num_bytes, 10.0, server.tiers.now_s)
    assert server.tiers.tokens_gained(hashes, num_known) == 0
    assert server.tiers.tokens_gained(hashes, len(hashes)) == 0


def test_what_others_have_is_read_although_it_takes_longer_and_the_forecast_counts_that() -> None:
    server = Server(step_seconds=lambda num_prefill, *_: 0.1 * num_prefill)
    server.run("first", PROMPT)
    server.evict()
    hashes = [key.hash for key in keys(PROMPT)]
    num_known = len(server.memory.index.match(hashes))
    server.tiers.chain._rates[0].note(server.carrier.num_bytes, 10.0, server.tiers.now_s)
    fetcher = server.tiers._fetcher
    assert fetcher.choose(server.memory, hashes, num_known) is None
    server.tier.keeps = False
    reads = fetcher.choose(server.memory, hashes, num_known)
    assert reads is not None
    assert len(reads.places) == len(hashes) - num_known
    assert reads.read_s == pytest.approx(10.0 * len(reads.places))
    assert server.tiers.tokens_gained(hashes, num_known) == 0


def test_private_prompts_are_kept_nowhere() -> None:
    server, salt = Server(), b"tenant" + PRIVATE
    private = [BlockKey(hash_) for hash_ in prompt_hashes(PROMPT, BLOCK_SIZE, salt)]
    for name in ("first", "again"):
        server.submit(name, PROMPT, salt)
        server.finish()
    server.evict()
    server.submit("last", PROMPT, salt)
    server.finish()
    assert server.tier.stats().num_blocks == sum(server.tier.has(key) for key in keys(EVICTING)) > 0
    assert len(server.memory.index.match([key.hash for key in private])) > 0
    assert not {*private} & {key for _, key in server.tiers._saver.unsaved(server.memory)}


def test_a_server_that_stops_keeps_what_can_be_found() -> None:
    server = Server()
    server.run("first", PROMPT)
    server.tiers.finish()
    assert server.carrier.num_out == len(server.memory.index) > 4


class LargeBlocks(FakeCarrier):
    """Blocks of 1 MiB, each of which takes 2 ms."""

    tiers: HandDrivenTiers

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.num_bytes = 1 << 20

    def copy_in(self, blocks: list[int], payloads: list[Payload]) -> None:  # noqa: ARG002
        self.num_in += len(blocks)
        self.tiers.now_s += 0.002 * len(blocks)


def test_streams_wait_for_what_comes_back_a_tenth_of_their_time_at_most() -> None:
    prompt = [*range(41 * BLOCK_SIZE)]
    carrier, tier = LargeBlocks(FakeRunner(60, BLOCK_SIZE)), HostTier(100 << 20)
    tiers = carrier.tiers = HandDrivenTiers([tier], carrier, random.Random(1))
    tiers.attach(SequenceMemory(60, BLOCK_SIZE))
    for key in keys(prompt):
        tier.write(key, bytes(carrier.num_bytes))
    tiers.expect([make_request("r", prompt, max_tokens=2)])
    tiers.turn()
    tiers.read_some()
    landed = list[int]()
    for step_s in (0.0, 0.101, 0.101, 0.0, 0.201, 10.0):
        before = carrier.num_in
        tiers.now_s += step_s
        tiers.turn()
        landed.append(carrier.num_in - before)
    assert landed == [1, 5, 5, 1, 10, 18]
