"""A trace on a real server, and beside it what the simulator says of it, with the step times of that server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from random import Random
from statistics import median

from penstock.app.bench.checkpoint import NUM_BYTES
from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.other_server import AnyServer
from penstock.app.bench.server_process import ServerProcess, samples
from penstock.app.bench.workloads import completion
from penstock.app.reader import TimedAnswer
from penstock.app.settings import Settings
from penstock.app.tables import number, percent, table
from penstock.engine.config import LoadOptions
from penstock.engine.model.dtype import choose_device
from penstock.gateway.wire.lanes import tier_of
from penstock.priority.lanes import parse_lane
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import Figures, Summary, summarise
from penstock.priority.simulator.trace import BLOCK_TOKENS, Arrival
from penstock.priority.steptime import NAMES

_BLOCK_SIZE = 16
_LOG_OF_OTHERS = 9.82
"""The logarithm of the sum over what all but the end token weigh in the choice of a random model's token."""
_NUM_ALONE, _APART_S, _SHORT_PROMPT = 20, 0.5, 64


def compare(
    server: ServerProcess,
    run: ModuleRunner,
    arrivals: Sequence[Arrival],
    token_ids: Sequence[int],
    keys: Mapping[str, str] | None = None,
) -> tuple[Machine, Summary, Summary]:
    """Sends the trace when it says, then simulates it: the machine, what was served, what was simulated.

    The simulator knows the engine only. What HTTP and the client take beside it is found with requests that are alone,
    and added to the simulated times.

    Args:
        token_ids: what prompts are made of.
        keys: API key by tenant; without any, all requests are of one tenant, in the simulation too.
    """
    if keys is None:
        arrivals = [
            Arrival(a.at_s, a.num_prompt, a.num_output, a.lane, hash_ids=a.hash_ids) for a in arrivals
        ]
    alone = [Arrival(_APART_S * i, _SHORT_PROMPT, 1, tenant=arrivals[0].tenant) for i in range(_NUM_ALONE)]
    answers_alone = send(server, run, alone, token_ids, keys or {}, seed=1)
    served = serve(server, run, arrivals, token_ids, keys or {})
    machine = machine_of(server.url)
    simulated = simulate(list(arrivals), machine)
    alone_s = median(answer.ttft_s for answer in answers_alone if answer.token_times_s)
    wire_s = alone_s - _median_ttft_s(simulate(alone, machine))
    simulated.policy = "simulated"
    delay(simulated, max(0.0, wire_s))
    return machine, served, summarise(simulated)


def serve(
    server: AnyServer,
    run: ModuleRunner,
    arrivals: Sequence[Arrival],
    token_ids: Sequence[int],
    keys: Mapping[str, str],
    seed: int = 0,
) -> Summary:
    """Sends the trace when it says; a running server has others' prompts in its cache only if `seed` is theirs."""
    answers = send(server, run, arrivals, token_ids, keys, seed)
    both = list(zip(arrivals, answers, strict=True))
    served = [served_of(arrival, answer, arrival.at_s) for arrival, answer in both]
    last_s = max(arrival.at_s + answer.ended_s - answer.started_s for arrival, answer in both)
    return summarise(Result("served", served, last_s))


def delay(result: Result, seconds: float) -> None:
    """All that was served comes so much later to its client."""
    for served in result.served:
        if served.first_token_s is not None:
            served.first_token_s += seconds
            served.last_token_s += seconds
        if served.finished_s is not None:
            served.finished_s += seconds


def _median_ttft_s(result: Result) -> float:
    return median(served.ttft_s for served in result.served if served.ttft_s is not None)


def served_of(arrival: Arrival, answer: TimedAnswer, at_s: float) -> Served:
    """A real answer as the simulator says it, on a clock on which its request came at `at_s`."""
    served = Served(arrival, num_tokens=answer.num_output_tokens, num_cached=answer.num_cached_tokens)
    if answer.lane is not None:
        served.lane = parse_lane(answer.lane)
    if answer.was_refused:
        served.refused = f"HTTP {answer.status}"
    elif answer.token_times_s:
        served.first_token_s = at_s + answer.ttft_s
        served.last_token_s = at_s + answer.token_times_s[-1] - answer.started_s
        served.finished_s = None if answer.error else at_s + answer.ended_s - answer.started_s
    return served


def machine_of(url: str) -> Machine:
    """The machine that a server of this process's environment has found itself to be, for the simulator."""
    found = samples(url)
    learnt = {s.labels["coefficient"]: s.value for s in found if s.name == "penstock_step_model_seconds"}
    blocks = next(s.value for s in found if s.name == "penstock_kv_blocks")
    settings = Settings.load({})
    options = LoadOptions(max_batch_tokens=settings.max_batch_tokens or 0)
    return Machine(
        coefficients={name: learnt[name] for name in NAMES},
        num_kv_tokens=int(blocks) * _BLOCK_SIZE,
        max_batch_tokens=options.for_device(choose_device(settings.device).type).max_batch_tokens,
        max_num_seqs=settings.max_num_seqs,
    )


def print_promises(url: str) -> None:
    """What the server itself counted of its promises, since its start."""
    found = samples(url)
    counts = {
        (s.labels["lane"], s.labels["outcome"]): int(s.value)
        for s in found
        if s.name == "penstock_promises_total"
    }
    interval = {
        (s.labels["lane"], s.labels["bound"]): percent(s.value)
        for s in found
        if s.name == "penstock_promise_coverage_ratio"
    }
    for lane in sorted({lane for lane, _ in counts}):
        kept, broken = counts[lane, "kept"], counts[lane, "broken"]
        if num := kept + broken:
            bounds = f"{interval[lane, 'low']} to {interval[lane, 'high']}"
            print(
                f"{lane}, as the server counted: {kept} of {num} promises kept, {percent(kept / num)} ({bounds})"
            )


def prompts(arrivals: Sequence[Arrival], token_ids: Sequence[int], seed: int = 0) -> list[list[int]]:
    """A prompt for each request: random, but 512 tokens that follow from each of its `hash_ids`."""
    return [_prompt(arrival, place, token_ids, seed) for place, arrival in enumerate(arrivals)]


def _prompt(arrival: Arrival, place: int, token_ids: Sequence[int], seed: int) -> list[int]:
    sources = [Random(f"{seed}/block/{hash_id}") for hash_id in arrival.hash_ids]
    prompt = [token_id for source in sources for token_id in source.choices(token_ids, k=BLOCK_TOKENS)]
    missing = max(0, arrival.num_prompt - len(prompt))
    own = Random(f"{seed}/own/{place}").choices(token_ids, k=missing)
    return (prompt + own)[: arrival.num_prompt]


def print_comparison(name: str, served: Summary, simulated: Summary) -> None:
    """Both side by side, and served over simulated."""
    head = [name, "TTFT P50 ms", "P90 ms", "tok/s", "kept", "refused"]
    rows = [_row("served", served), _row("simulated", simulated)]
    ratios = [
        "-" if not (real and said) else f"{real / said:.2f}"
        for real, said in zip(figures_of(served), figures_of(simulated), strict=True)
    ]
    print("\n" + table(head, [*rows, ["served / simulated", *ratios, ""]]))


def print_groups(summaries: Sequence[Summary]) -> None:
    """First tokens by length of the prompt, by tenant and by lane, where there are several."""
    for group in ("lengths", "tenants", "lanes"):
        by_policy = {summary.policy: getattr(summary, group) for summary in summaries}
        names = list(dict.fromkeys(name for figures in by_policy.values() for name in figures))
        head = [f"TTFT by {group}", "requests", "refused", "kept", "P50 s", "P90 s", "P99 s"]
        rows = [
            _group_row(f"{name}, {policy}", figures[name])
            for name in names
            for policy, figures in by_policy.items()
            if name in figures
        ]
        if len(names) > 1:
            print("\n" + table(head, rows))


def _group_row(name: str, figures: Figures) -> list[str]:
    counts = [str(figures.offered), str(figures.refused), percent(figures.attainment)]
    return [name, *counts, *map(number, (figures.ttft_s.p50, figures.ttft_s.p90, figures.ttft_s.p99))]


def _row(name: str, summary: Summary) -> list[str]:
    ttft_p50_ms, ttft_p90_ms, rate, kept = figures_of(summary)
    return [name, *map(number, (ttft_p50_ms, ttft_p90_ms, rate)), percent(kept), str(summary.total.refused)]


def figures_of(summary: Summary) -> tuple[float | None, float | None, float, float | None]:
    """TTFT P50 and P90 in ms, output tokens a second, and the part of the promises that was kept."""
    ttft_s = summary.total.ttft_s
    p50_ms, p90_ms = (None if value is None else 1000 * value for value in (ttft_s.p50, ttft_s.p90))
    return p50_ms, p90_ms, summary.output_tokens_per_s, summary.total.attainment


def body_of(arrival: Arrival, prompt: list[int]) -> dict[str, object]:
    """The request of an arrival; one that allows itself more than it gets samples until it happens to end."""
    tier = "auto" if arrival.lane is None else tier_of(arrival.lane)
    body = completion("bench", prompt, arrival.max_tokens or arrival.num_output, tier)
    if arrival.max_tokens:
        bias = _LOG_OF_OTHERS - log(arrival.num_output)
        body |= {"temperature": 1, "ignore_eos": False, "logit_bias": {str(NUM_BYTES + 1): bias}}
    return body | ({"n": arrival.n} if arrival.n > 1 else {})


def send(
    server: AnyServer,
    run: ModuleRunner,
    arrivals: Sequence[Arrival],
    token_ids: Sequence[int],
    keys: Mapping[str, str],
    seed: int = 0,
) -> list[TimedAnswer]:
    """The answers, in the order of the trace."""
    first_s = arrivals[0].at_s
    bodies = [
        [body_of(arrival, prompt)]
        for arrival, prompt in zip(arrivals, prompts(arrivals, token_ids, seed), strict=True)
    ]
    job = Job(
        server.host,
        server.port,
        "/v1/completions",
        bodies,
        starts_s=[arrival.at_s - first_s for arrival in arrivals],
        keys=[keys.get(arrival.tenant, "") for arrival in arrivals],
    )
    return ask(run, job)
