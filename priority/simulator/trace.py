"""Traces: who asks for what, and when. Generated like the published ones, or read from Mooncake's JSONL.

The shapes follow measurements of public traces: lengths are lognormal, arrivals are Poisson within windows whose rate
is itself random (Gamma), so that they are burstier than Poisson. Everything comes from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from math import ceil, exp, inf
from random import Random

from penstock.priority.lanes import Lane, parse_lane

AUTO = "auto"
"""The `lane` of a request that leaves it to the server."""
BLOCK_TOKENS = 512
"""Tokens that one entry of `hash_ids` stands for, as Mooncake has it."""
_WINDOW_S = 10.0
_BURST_LONG, _BURST_SHORT = (18, 24_000), (11, 2_000)
_BURST_OUTPUT, _BURST_S = 64, 0.191
"""How many prompts of how many tokens come within which time, after https://github.com/sgl-project/sglang/issues/22831"""
_MOST_AGENT_TOKENS = 28_000
_MOST = 1e15
_STREAMS = 64
"""The streams that the noisy one of the default clients begins at a time."""


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    num_prompt: int
    num_output: int
    lane: Lane | None = Lane.INTERACTIVE
    """None for a stream that leaves its lane to the server."""
    tenant: str = "default"
    hash_ids: tuple[int, ...] = ()
    """An id for each 512 tokens of the prompt; equal ids from the start mean an equal prefix. Empty: none."""
    n: int = 1
    """Choices, each of `num_output` tokens."""
    max_tokens: int = 0
    """The output tokens that the request allows itself, if these are more than come."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lognormal, cut at both ends."""

    mu: float
    sigma: float
    most: int

    def draw(self, rng: Random) -> int:
        return max(1, min(self.most, int(exp(rng.gauss(self.mu, self.sigma)))))


@dataclass(frozen=True, slots=True)
class TrafficKind:
    """A sort of traffic: lengths, and how bursty its arrivals are (the Gamma shape of the rate; less is burstier)."""

    prompt: LengthDistribution
    output: LengthDistribution
    shape: float


KINDS = {
    "conversation": TrafficKind(
        LengthDistribution(6.63, 0.99, 14_050), LengthDistribution(5.02, 0.86, 1_000), 18.0
    ),
    "code": TrafficKind(LengthDistribution(7.00, 1.36, 7_437), LengthDistribution(2.79, 0.85, 1_000), 0.4),
    "bursty": TrafficKind(LengthDistribution(6.63, 0.99, 14_050), LengthDistribution(5.02, 0.86, 1_000), 0.8),
    "chat": TrafficKind(LengthDistribution(4.1, 0.6, 512), LengthDistribution(3.4, 0.5, 128), 18.0),
}
"""`conversation` and `code` are fitted to Azure's traces of 2023; `chat` suits small models."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The trace to generate: rate, duration, and a factor on all lengths."""

    rate: float
    duration_s: float
    seed: int = 0
    scale: float = 1.0
    kind: str = "conversation"


def steady(demand: Demand) -> list[Arrival]:
    """Five tenants, all interactive."""
    return _merged(_quiet_tenants(demand, demand.rate))


def noisy_tenant(demand: Demand) -> list[Arrival]:
    """Five quiet tenants at two sevenths of the rate; after a sixth of the time one sends all the rest."""
    return _merged(_quiet_tenants(demand, demand.rate * 2 / 7), _noisy(demand, demand.rate * 5 / 7))


def noisy_burst(demand: Demand) -> list[Arrival]:
    """The noisy tenant, and two bursts of long batch requests."""
    quiet, noisy = demand.rate * 4 / 11, demand.rate * 7 / 11
    return _merged(_quiet_tenants(demand, quiet), _noisy(demand, noisy), _bursts(demand))


def batch_flood(demand: Demand) -> list[Arrival]:
    """Five quiet tenants, and two bursts of long batch requests."""
    return _merged(_quiet_tenants(demand, demand.rate), _bursts(demand))


def flash_crowd(demand: Demand) -> list[Arrival]:
    """Fifty tenants at a tenth of the rate, and at all of it from a fifth of the time to two fifths."""
    rng = Random(f"{demand.seed}/crowd")
    begin_s, end_s = 0.2 * demand.duration_s, 0.4 * demand.duration_s
    crowd = [a for a in _arrivals(demand, demand.rate * 0.9, "crowd") if begin_s <= a.at_s < end_s]
    everyone = _merged(_arrivals(demand, demand.rate * 0.1, "regulars"), crowd)
    return [replace(arrival, tenant=f"tenant-{rng.randrange(50)}") for arrival in everyone]


def sessions(demand: Demand) -> list[Arrival]:
    """Conversations of a geometric number of turns; each prompt is all that was said, and one of 20 system prompts."""
    rng = Random(f"{demand.seed}/sessions")
    talk = _Talk(KINDS["chat"], pause=(3.4, 0.7), end=0.4)
    arrivals, ids = list[Arrival](), count(1_000)
    for number, start_s in enumerate(_poisson(rng, demand.rate * 0.4, 0.0, demand.duration_s)):
        arrivals += _turns(rng, demand, talk, number, start_s, [_zipf(rng, 20)], ids)
    return _merged(arrivals)


def agents(demand: Demand) -> list[Arrival]:
    """Agents at work, as in Mooncake's traces: long system prompts, many turns, each all of the last and something new.

    50 system prompts of 1,024 to 4,096 tokens (by Zipf's law), five turns on average some five seconds apart, until
    28,000 tokens.
    """
    rng = Random(f"{demand.seed}/agents")
    talk = _Talk(KINDS[demand.kind], pause=(1.6, 0.6), end=0.2, most_tokens=_MOST_AGENT_TOKENS)
    arrivals, ids = list[Arrival](), count(1_000_000)
    for number, start_s in enumerate(_poisson(rng, demand.rate / 5, 0.0, demand.duration_s)):
        system = _zipf(rng, 50)
        hash_ids = [100 * system + i for i in range(2 + system % 7)]
        arrivals += _turns(rng, demand, talk, number, start_s, hash_ids, ids)
    return _merged(arrivals)


@dataclass(frozen=True, slots=True)
class _Talk:
    """The shape of conversations."""

    kind: TrafficKind
    pause: tuple[float, float]
    """Between turns: mean and deviation of the logarithm of its seconds."""
    end: float
    """The probability that a turn is the last one."""
    most_tokens: float = inf
    """The most tokens of a prompt."""


def _turns(
    rng: Random,
    demand: Demand,
    talk: _Talk,
    number: int,
    start_s: float,
    hash_ids: list[int],
    ids: Iterator[int],
) -> Iterator[Arrival]:
    """One conversation, from a system prompt of these blocks on; each prompt is all that was said before it."""
    at_s, num_prompt = start_s, len(hash_ids) * BLOCK_TOKENS
    while at_s < demand.duration_s:
        num_prompt += max(1, int(talk.kind.prompt.draw(rng) * demand.scale))
        if num_prompt > talk.most_tokens:
            break
        hash_ids += islice(ids, max(0, -(-num_prompt // BLOCK_TOKENS) - len(hash_ids)))
        num_output = max(1, int(talk.kind.output.draw(rng) * demand.scale))
        yield Arrival(at_s, num_prompt, num_output, tenant=f"tenant-{number % 5}", hash_ids=tuple(hash_ids))
        num_prompt += num_output
        at_s += exp(rng.gauss(*talk.pause))
        if rng.random() < talk.end:
            break


def mixed(demand: Demand) -> list[Arrival]:
    """Seven tenths interactive, two standard, one batch; tenants by Zipf's law."""
    rng = Random(f"{demand.seed}/mixed")
    lanes = [Lane.INTERACTIVE] * 7 + [Lane.STANDARD] * 2 + [Lane.BATCH]
    arrivals = _arrivals(demand, demand.rate, "mixed")
    return [
        replace(a, lane=lanes[int(rng.random() * 10)], tenant=f"tenant-{_zipf(rng, 10)}") for a in arrivals
    ]


def long_prompts(demand: Demand) -> list[Arrival]:
    """One tenant sends 18 prompts of 24,000 tokens and 11 of 2,000 within 191 ms, again as often as the rate says."""
    return _long_and_short(demand, "long-prompts", num_tenants=1, long_first=False)


def long_first(demand: Demand) -> list[Arrival]:
    """The same with all the long ones before the short ones."""
    return _long_and_short(demand, "long-first", num_tenants=1, long_first=True)


def long_tenants(demand: Demand) -> list[Arrival]:
    """The same, long ones first, from ten tenants that all send both."""
    return _long_and_short(demand, "long-tenants", num_tenants=10, long_first=True)


def default_clients(demand: Demand) -> list[Arrival]:
    """Four tenants that name no lane: three send a quarter of the rate together, one the rest, 64 streams at a time."""
    arrivals: list[Arrival] = []
    for number in range(3):
        some = _arrivals(demand, demand.rate / 12, f"quiet-{number}")
        arrivals += [replace(arrival, tenant=f"quiet-{number}") for arrival in some]
    noisy = _arrivals(demand, demand.rate * 3 / 4, "noisy")
    for number, arrival in enumerate(noisy):
        at_s = noisy[number - number % _STREAMS].at_s
        arrivals.append(replace(arrival, at_s=at_s, tenant="noisy"))
    return [replace(arrival, lane=None) for arrival in _merged(arrivals)]


SCENARIOS: dict[str, Callable[[Demand], list[Arrival]]] = {
    "steady": steady,
    "mixed": mixed,
    "noisy-tenant": noisy_tenant,
    "noisy-burst": noisy_burst,
    "batch-flood": batch_flood,
    "flash-crowd": flash_crowd,
    "sessions": sessions,
    "agents": agents,
    "long-prompts": long_prompts,
    "long-first": long_first,
    "long-tenants": long_tenants,
    "default-clients": default_clients,
}


def read_trace(lines: Iterable[str]) -> list[Arrival]:
    """Mooncake's JSONL: timestamp (ms), input_length, output_length, hash_ids; and `lane` (or "auto") and `tenant`.

    Raises:
        TraceError: naming the line and the field.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            arrivals.append(_parse(line, number))
            if len(arrivals) > 1 and arrivals[-1].at_s < arrivals[-2].at_s:
                raise TraceError(f"line {number}: timestamp goes back in time")
    if not arrivals:
        raise TraceError("the trace is empty")
    return arrivals


def write_trace(arrivals: Iterable[Arrival]) -> Iterator[str]:
    for arrival in arrivals:
        fields = {
            "timestamp": round(arrival.at_s * 1000, 3),
            "input_length": arrival.num_prompt,
            "output_length": arrival.num_output,
            "hash_ids": list(arrival.hash_ids),
            "lane": AUTO if arrival.lane is None else arrival.lane.label,
            "tenant": arrival.tenant,
        }
        yield json.dumps(fields) + "\n"


def _parse(line: str, number: int) -> Arrival:
    fields = _object(line, number)
    at_ms = _number(fields, "timestamp", number, 0)
    num_prompt = _count(fields, "input_length", number)
    num_output = _count(fields, "output_length", number)
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(i) is int for i in hash_ids):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers")
    lane = _lane(fields, number)
    tenant = fields.get("tenant", "default")
    if not isinstance(tenant, str):
        raise TraceError(f"line {number}: tenant must be a string, not {tenant!r}")
    return Arrival(at_ms / 1000, num_prompt, num_output, lane, tenant, tuple(hash_ids))


def _object(line: str, number: int) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"line {number}: not JSON") from None
    if not isinstance(fields, dict):
        raise TraceError(f"line {number}: not an object")
    return fields


def _lane(fields: dict[str, object], number: int) -> Lane | None:
    label = fields.get("lane", Lane.INTERACTIVE.label)
    try:
        return None if label == AUTO else parse_lane(label)
    except ValueError as error:
        raise TraceError(f"line {number}: {error}") from None


def _number(fields: dict[str, object], name: str, number: int, least: float) -> float:
    value = fields.get(name)
    if value is None:
        raise TraceError(f"line {number}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < _MOST:
        raise TraceError(f"line {number}: {name} must be a number of at least {least:g}, not {value!r}")
    return float(value)


def _count(fields: dict[str, object], name: str, number: int) -> int:
    value = _number(fields, name, number, 1)
    if not value.is_integer():
        raise TraceError(f"line {number}: {name} must be a whole number, not {value!r}")
    return int(value)


def _quiet_tenants(demand: Demand, rate: float) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for number in range(5):
        some = _arrivals(demand, rate / 5, f"quiet-{number}")
        arrivals += [replace(arrival, tenant=f"quiet-{number}") for arrival in some]
    return arrivals


def _noisy(demand: Demand, rate: float) -> list[Arrival]:
    some = _arrivals(demand, rate, "noisy")
    return [replace(arrival, tenant="noisy") for arrival in some if arrival.at_s > demand.duration_s / 6]


def _bursts(demand: Demand) -> list[Arrival]:
    """Two bursts of long batch requests, each as many as the quiet ones send in a fifth of the time."""
    rng = Random(f"{demand.seed}/bursts")
    kind = KINDS[demand.kind]
    number = max(1, int(demand.rate * demand.duration_s / 10))
    arrivals = []
    for part in (0.2, 0.55):
        for i in range(number):
            num_prompt = max(1, min(kind.prompt.most, int(3 * kind.prompt.draw(rng) * demand.scale)))
            num_output = max(1, int(kind.output.draw(rng) * demand.scale))
            at_s = demand.duration_s * part + i * 0.01
            arrivals.append(Arrival(at_s, num_prompt, num_output, Lane.BATCH, "batch"))
    return arrivals


def _long_and_short(demand: Demand, name: str, *, num_tenants: int, long_first: bool) -> list[Arrival]:
    """Bursts in the standard lane, where requests go that name none."""
    rng = Random(f"{demand.seed}/{name}")
    lengths = [num_tokens for num, num_tokens in (_BURST_LONG, _BURST_SHORT) for _ in range(num)]
    arrivals, every_s = list[Arrival](), len(lengths) / demand.rate
    for burst in range(ceil(demand.duration_s / every_s)):
        if not long_first:
            rng.shuffle(lengths)
        times = sorted(burst * every_s + rng.uniform(0.0, _BURST_S) for _ in lengths)
        arrivals += [
            Arrival(
                at_s,
                max(1, int(num_tokens * demand.scale)),
                max(1, int(_BURST_OUTPUT * demand.scale)),
                Lane.STANDARD,
                f"tenant-{place % num_tenants}",
            )
            for place, (at_s, num_tokens) in enumerate(zip(times, lengths, strict=True))
        ]
    return [arrival for arrival in _merged(arrivals) if arrival.at_s < demand.duration_s]


def _arrivals(demand: Demand, rate: float, name: str) -> list[Arrival]:
    rng = Random(f"{demand.seed}/{name}")
    kind = KINDS[demand.kind]
    arrivals = []
    start_s = 0.0
    while start_s < demand.duration_s:
        window_rate = rng.gammavariate(kind.shape, rate / kind.shape)
        end_s = min(start_s + _WINDOW_S, demand.duration_s)
        for at_s in _poisson(rng, window_rate, start_s, end_s):
            num_prompt = max(1, int(kind.prompt.draw(rng) * demand.scale))
            arrivals.append(Arrival(at_s, num_prompt, max(1, int(kind.output.draw(rng) * demand.scale))))
        start_s = end_s
    return arrivals


def _poisson(rng: Random, rate: float, start_s: float, end_s: float) -> Iterator[float]:
    at_s = start_s
    while rate > 0:
        at_s += rng.expovariate(rate)
        if at_s >= end_s:
            return
        yield at_s


def _zipf(rng: Random, number: int) -> int:
    weights = [1 / rank**1.1 for rank in range(1, number + 1)]
    return rng.choices(range(number), weights)[0]


def _merged(*parts: list[Arrival]) -> list[Arrival]:
    return sorted((arrival for part in parts for arrival in part), key=lambda arrival: arrival.at_s)
