"""Whatever was done to Redis, when all is deleted and released nothing is left but what expires by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.gateway.store.interface import JournalChange, Quota
from tests.clock import Clock
from tests.few import examples
from tests.gateway.store.durable_store import DurableStore
from tests.gateway.store.stores import OPENED, record, redis_store
from tests.redis_server import RedisServer

IDS = st.sampled_from("abc")
TENANTS = st.sampled_from(["t", "u"])
TTLS = st.sampled_from([60.0, 600.0])


class TwoStores(RuleBasedStateMachine):
    """Memory says what Redis should answer."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.server.call("FLUSHALL")
        self.runner = asyncio.Runner()
        clock = Clock()
        self.memory, self.redis = DurableStore(clock), redis_store(self.server, clock=clock)
        self.quota = Quota(requests_per_minute=10, tokens_per_minute=100, max_streams=2)

    def do(self, one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> None:
        """Both answer the same."""
        assert self.runner.run(one) == self.runner.run(other)

    @rule(id_=IDS, tenant=TENANTS, value=st.binary(max_size=3), ttl_s=TTLS)
    def put(self, id_: str, tenant: str, value: bytes, ttl_s: float) -> None:
        key = record(id_, tenant=tenant)
        self.do(self.memory.put(key, value, ttl_s), self.redis.put(key, value, ttl_s))

    @rule(id_=IDS, tenant=TENANTS, ttl_s=st.none() | TTLS)
    def get(self, id_: str, tenant: str, ttl_s: float | None) -> None:
        key = record(id_, tenant=tenant)
        self.do(self.memory.get(key, ttl_s), self.redis.get(key, ttl_s))

    @rule(id_=IDS, tenant=TENANTS, value=st.binary(max_size=3))
    def add(self, id_: str, tenant: str, value: bytes) -> None:
        key = record(id_, tenant=tenant)
        self.do(self.memory.add(key, value, 60), self.redis.add(key, value, 60))

    @rule(id_=IDS, tenant=TENANTS, old=st.binary(max_size=1), value=st.binary(max_size=1))
    def replace(self, id_: str, tenant: str, old: bytes, value: bytes) -> None:
        key = record(id_, tenant=tenant)
        self.do(self.memory.replace(key, old, value, 60), self.redis.replace(key, old, value, 60))

    @rule(id_=IDS, tenant=TENANTS)
    def delete(self, id_: str, tenant: str) -> None:
        key = record(id_, tenant=tenant)
        self.do(self.memory.delete(key), self.redis.delete(key))

    @rule(
        id_=IDS,
        header=st.none() | st.just(b"h"),
        offset=st.integers(0, 4),
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
        end=st.none() | st.just(b"e"),
    )
    def write(
        self, id_: str, header: bytes | None, offset: int, token_ids: tuple[int, ...], end: bytes | None
    ) -> None:
        changes = [JournalChange(id_, header, offset, token_ids, 60, end)]
        self.do(self.memory.write_journals(changes), self.redis.write_journals(changes))

    @rule(id_=IDS)
    def delete_journal(self, id_: str) -> None:
        self.do(self.memory.delete_journals([id_]), self.redis.delete_journals([id_]))

    @rule(tenant=TENANTS, id_=IDS, num_tokens=st.integers(0, 120))
    def reserve(self, tenant: str, id_: str, num_tokens: int) -> None:
        self.do(
            self.memory.reserve(tenant, self.quota, num_tokens, id_),
            self.redis.reserve(tenant, self.quota, num_tokens, id_),
        )

    @rule(tenant=TENANTS, num_tokens=st.integers(-120, 120))
    def settle(self, tenant: str, num_tokens: int) -> None:
        self.do(
            self.memory.settle(tenant, self.quota, num_tokens, "lease"),
            self.redis.settle(tenant, self.quota, num_tokens, "lease"),
        )

    @rule(tenant=TENANTS, id_=IDS)
    def release(self, tenant: str, id_: str) -> None:
        self.do(self.memory.release(tenant, id_), self.redis.release(tenant, id_))

    @invariant()
    def both_know_the_same(self) -> None:
        for tenant in ("t", "u"):
            self.do(self.memory.list("response", tenant, 10), self.redis.list("response", tenant, 10))
        for id_ in "abc":
            self.do(self.memory.read_journal(id_), self.redis.read_journal(id_))

    def teardown(self) -> None:
        try:
            for tenant in ("t", "u"):
                for id_ in "abc":
                    self.runner.run(self.redis.delete(record(id_, tenant=tenant)))
                    self.runner.run(self.redis.release(tenant, id_))
                self.runner.run(self.redis.settle(tenant, self.quota, -1000, "lease"))
            self.runner.run(self.redis.delete_journals(["a", "b", "c"]))
            left = {key.removeprefix("penstock:{test}:") for key in self.server.all_keys()}
            assert {key for key in left if not key.endswith(":requests")} <= {"replicas", "since"}
            assert all(self.server.call("PTTL", key) > 0 for key in self.server.all_keys())
        finally:
            while OPENED:
                self.runner.run(OPENED.pop().aclose())
            self.runner.close()


@pytest.mark.hypothesis
def test_nothing_is_left(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoStores, "server", server, raising=False)
    run_state_machine_as_test(
        TwoStores, settings=settings(max_examples=examples(15), stateful_step_count=15, deadline=None)
    )
