"""What the documentation says of numbers, names and lists is what the code has.

Most claims are sentences: each is written here with the code's own value in it, and has to stand on its page.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tomllib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from docs.generate import FOLDER, parser_of
from penstock.app.bench.workloads import WORKLOADS
from penstock.app.calibration import PIECE_TOKENS
from penstock.app.check import command, ours
from penstock.app.settings import choices
from penstock.app.simulate.inputs import GPU_COST
from penstock.cluster import members, plan, relay, switch
from penstock.engine import config
from penstock.engine.kernels.cpu.levels import LEVELS
from penstock.engine.model import quantize_cache
from penstock.engine.model.families import FAMILIES
from penstock.engine.model.gguf.container import TYPES
from penstock.engine.model.gguf.kinds import KINDS
from penstock.engine.parallel import group
from penstock.engine.planning import block_map, lookup, pace, price, rehearsal
from penstock.engine.planning.params import SamplingParams
from penstock.engine.quant.storages import packing
from penstock.engine.text import grammar_check, grammars
from penstock.gateway import watch
from penstock.gateway.endpoints import events, state
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.http.connections import Timeouts
from penstock.gateway.limits import Limits
from penstock.gateway.sessions.batches import batch, files, run
from penstock.gateway.sessions.recordings.registry import Keeping
from penstock.gateway.store import interface, link, memory, pieces, redis, redis_records, time_budget
from penstock.gateway.wire import compiling
from penstock.gateway.wire.tools import grammars as call_grammars
from penstock.priority import (
    coverage,
    lengths,
    pacing,
    ratios,
    rivals,
    shares,
    steptime,
    turns,
    waiting,
    yielding,
)
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.routing import index, router
from penstock.priority.simulator.cluster import Wires
from penstock.priority.simulator.run import Machine
from tests.docs.markdown import ROOT, Page, pages, tracked

INTERACTIVE = DEFAULT_POLICIES[Lane.INTERACTIVE]
LIMITS, KEEPING, TIMEOUTS, WIRES = Limits(), Keeping(), Timeouts(), Wires()
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MIB, KIB, HOUR = 1 << 20, 1 << 10, 3600


def of_lane(lane: Lane, *, weight: bool) -> str:
    """The cells of a table of lanes that follow its names."""
    policy = DEFAULT_POLICIES[lane]
    return f"| {policy.ttft_s:g} s | {policy.tpot_s * 1000:g} ms |" + (
        f" {policy.weight} |" if weight else ""
    )


def num_parameters(weights: Path) -> int:
    """Reads the header of a safetensors file; a table of tokens is no parameter."""
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for tensor in header.values() if tensor.get("dtype") == "F16")


DESCRIPTIONS = {family.describe for family in FAMILIES.values()}
_TOLD = Fraction(ratios.TOLD).limit_denominator(10)
CLAIMS: dict[str, list[str]] = {
    "README.md": [
        f"| interactive | `priority` {of_lane(Lane.INTERACTIVE, weight=False)}",
        f"| standard | `default` {of_lane(Lane.STANDARD, weight=False)}",
        f"| model families | {len(DESCRIPTIONS)}, dense, with experts, with states |",
    ],
    "docs/guide/lanes.md": [
        f"| interactive | `priority` {of_lane(Lane.INTERACTIVE, weight=True)}",
        f"| standard | `default` {of_lane(Lane.STANDARD, weight=True)}",
        f"and always gets some | none | {DEFAULT_POLICIES[Lane.BATCH].weight} |",
    ],
    "docs/guide/deploy.md": [
        f"first token in {INTERACTIVE.ttft_s:g} s, then one every {INTERACTIVE.tpot_s * 1000:g} ms",
        f"comment every {TIMEOUTS.keepalive_s:g} s",
        f"Nothing waits more than {interface.MAX_WAIT_S * 1000:g} ms for it",
    ],
    "docs/guide/install.md": [
        f"Compiling the {WORDS[len(LEVELS['x86_64'])]} levels of x86-64",
    ],
    "docs/guide/clients.md": [
        f"`xtc_threshold` ({SamplingParams().xtc_threshold:g} unless it says)",
        f"{run.LINES_AT_ONCE} lines of all batches at a time",
        f"a line is as long as a body may be, {LIMITS.max_body_bytes // MIB} MiB",
        f"an upload of at most {LIMITS.max_upload_bytes // MIB} MiB",
        f"{files.MAX_FILES} files with {files.MAX_BYTES // MIB} MiB together, "
        f"without Redis {files.MAX_BYTES_IN_MEMORY // MIB} MiB",
        f"{run.MAX_AT_WORK} batches at work",
        f"{batch.MAX_LINES:,} lines; results of {batch.MAX_RESULT_BYTES // MIB} MiB",
        f"{batch.WINDOW_S // HOUR} hours, then the other lines are `batch_expired`",
        f"`errors` names the first {batch.MAX_ERRORS}",
        f"files for {WORDS[int(files.KEPT_S / 24 / HOUR)]} days",
        f"in another one of the same model after {interface.LEASE_S:g} seconds",
        f"A batch over which {WORDS[run.MAX_ATTEMPTS]} processes have died",
        f"at most {LIMITS.max_inputs:,} documents, or texts on a side",
        f"at most {LIMITS.max_beams}, and at most as many as sequences may run",
    ],
    "docs/guide/tools.md": [
        f"schemas of at most {call_grammars.MAX_TOOLS_BYTES // MIB} MiB of JSON",
    ],
    "docs/guide/structured.md": [
        f"a text of at most {LIMITS.max_grammar_bytes // KIB} KiB",
        f"keeps the last {grammars._MOST_COMPILED}, by tenant",
        f"Up to {grammars._MOST_IN_USE:,} may be in use",
        f"followed for {grammar_check._NUM_STEPS} bytes",
        f"more than {grammar_check._PATIENCE_S:g} seconds",
        f"Up to {WORDS[grammar_check.MOST_AT_ONCE]} new grammars are compiled at once",
        f"A request that waits for {compiling._PATIENCE_S:g} seconds",
        f"(at most {LIMITS.max_allowed_token_ids:,})",
        f"(at most {LIMITS.max_bad_words}, of {LIMITS.max_bad_word_chars} characters)",
    ],
    "docs/guide/window.md": [
        f"the last {watch.MAX_STEPS} steps at most",
        f"the pool in at most {block_map.MAX_CELLS:,} cells",
        f"comes {WORDS[round(1 / events.EVERY_S)].replace('two', 'twice')} a second",
    ],
    "docs/guide/sessions.md": [
        f"no call to it takes longer than {interface.MAX_WAIT_S * 1000:g} ms",
        "A reply that nobody reads goes on for a minute (`background`: to its end), and is kept for "
        f"{WORDS[int(KEEPING.keep_s / TIMEOUTS.detached_s)]} after it ended",
    ],
    "docs/guide/cluster.md": [
        f"within {state.EVERY_S * 1000:g} ms of a request that comes",
        f"{WORDS[round(1 / state.CALM_S)]} times a second while streams just go on",
        f"silent for {switch.STALL_S:g} s in a stream, or {switch.LOST_S:g} s in any reply",
        f"after its stream of state was given up ({members.SILENT_S:g} s)",
        f"given up after {relay.MEND_S:g} s",
        f"{plan._MARGIN_S:g} s more than `--drain-timeout`",
        f"after {interface.ALIVE_S:g} s without a heartbeat in Redis",
    ],
    "docs/guide/simulate.md": [
        f"{GPU_COST['alpha_s'] * 1e3:g} ms, {GPU_COST['beta_s'] * 1e6:g} us, {GPU_COST['gamma_s'] * 1e6:g} us, "
        f"{GPU_COST['delta_s'] * 1e9:g} ns, {GPU_COST['epsilon_s'] * 1e9:g} ns, "
        f"and KV for {Machine(coefficients={}).num_kv_tokens:,} tokens",
    ],
    "docs/internals/parallel.md": [f"the others wait for {group._TIMEOUT.seconds / 60:g} minutes"],
    "docs/internals/scheduling.md": [
        f"a computed prompt token | {shares.COST_PREFILL:,} | 1/{shares._TOGETHER // 2} |",
        f"found in the prefix cache | {shares.COST_HIT} | | | an output token, which reads its KV for itself alone | "
        f"{shares.COST_OUTPUT:,} | 2 |",
        f"ahead of the next less urgent one by {waiting.LEAD_TOKENS:,} prompt tokens",
        f"Tenants within {turns.LOCALITY_TOKENS:,} prompt tokens",
        f"{WORDS[_TOLD.numerator].capitalize()} in {WORDS[_TOLD.denominator]} first tokens come before the reported",
        f"{WORDS[round(10 * ratios.LATE)]} in ten before the time that is compared with the promise",
        f"of the tenant's last {ratios._KEPT} requests or, below {ratios._ENOUGH}, of its lane's",
        f"from the last {lengths._KEPT} answers of the tenant",
        f"within {pacing.ALONE_SLACK:g} times its duration alone",
        f"raises it by {coverage.GAMMA * (1 - coverage.ALPHA):g}, each kept one",
        f"lowers it by {coverage.GAMMA * coverage.ALPHA:g}",
        f"{coverage.ALPHA:g} T + (R + {coverage.GAMMA:g} D - 1) / {coverage.GAMMA:g}",
        f"the {rivals.MOST_NAMED} that sent last are looked at one by one",
        f"prompts of {min(rehearsal._PROMPTS)} to {max(rehearsal._PROMPTS)} tokens of its own",
        f"Until {steptime._ENOUGH_STEPS} steps have been measured",
        f"is due after 1 / (1 / S + 1 / {pacing._STRETCH:g}t)",
        f"keep it within {pacing._MARGIN * 100:g} % of the strictest TPOT promise",
        f"never more than {WORDS[pacing._CATCH_UP - 1]} in a row, and prefill continues at {pacing._LEAST_PREFILL}",
        f"at most {WORDS[yielding.MAX_VICTIMS]}, the cheapest to recompute first, and only if that is enough",
        f"No sequence gives way more than {WORDS[yielding.MAX_PREEMPTIONS]} times",
    ],
    "docs/internals/speculation.md": [
        f"indexes at most {lookup._STEP_TOKENS:,} tokens",
        f"At most {lookup._MOST_INDEXED:,} tokens of running sequences are indexed",
        f"{2 * lookup._MEMORY_TOKENS:,} are remembered per tenant, for {lookup._MOST_TENANTS} tenants, "
        f"and {lookup._MOST_REMEMBERED:,} in all",
        f"how many tokens, at most {config.MAX_DRAFTS}:",
        f"They have {config._VERIFIED_ROWS} rows",
        f"gain {100 * price._LONG:.0f} % more than its part",
        f"cost {100 * pace._LOOK_COST:g} % of the time, and at least once in {pace._MOST_BETWEEN_LOOKS} steps",
        f"promise {100 * (pace._PAYS - 1):.0f} % more tokens",
        f"{pace._PAIRS} steps with drafts alternate with {pace._PAIRS} without",
        f"one step in {pace._KEPT_STEPS + 1} has none",
        f"rest for {pace._SHORTEST_REST} steps, doubled for each loss in a row up to {pace._LONGEST_REST:,}",
    ],
    "docs/internals/quantization.md": [
        f"at most {quantize_cache.MOST_BYTES >> 30} GiB in all",
        f"less than {quantize_cache.SMALLEST // MIB} MiB of linear maps",
        f"groups of less than {packing._SMALLEST_GROUP} inputs",
        f"pieces of {PIECE_TOKENS} tokens",
        f"`--calibration-tokens` ({parser_of(['quantize']).get_default('calibration_tokens'):,})",
    ],
    "docs/internals/routing.md": [
        f"at the latest {WORDS[int(router.LEASE_S)]} seconds after its forecast",
        f"{index.DEFAULT_MAX_BLOCKS // 10**6} million by default",
        f"`--push-ms` later ({WIRES.push_delay_s * 1000:g})",
        f"{WIRES.kv_bytes:,} bytes a token",
        f"`--transfer-gbps` ({WIRES.transfer_gbps:g})",
    ],
    "docs/internals/store.md": [
        f"A call takes at most {interface.MAX_WAIT_S * 1000:g} ms",
        f"for up to {time_budget.RETRY_S:g} seconds: a resumable reply",
        f"After {WORDS[link.MAX_FAILURES]} failures in a row",
        f"zset | ID by when it was put (us); at most {redis_records.MAX_LISTED:,}",
        f"parts of about {pieces.PIECE_BYTES >> 10} KiB",
        f"twice up to {pieces.FANOUT**2} pieces",
        f"all records together have {memory.MAX_BYTES // MIB} MiB",
        f"an hour or longer may have {redis_records.MAX_TENANT_BYTES // MIB} MiB",
        f"and with {redis_records.RECORD_BYTES} bytes for each",
        f"HASH by hotness; at most {redis.MAX_PREFIXES:,} | {redis.PREFIX_TTL_S / HOUR:g} h after",
        f"HASH by last use; at most {redis.MAX_PREFIXES:,} | {redis.RESIDENT_TTL_S:g} s after the last heartbeat",
        f"| {interface.ALIVE_S:g} s after the last of all |",
    ],
}


DEMO = ROOT / "app" / "demo"
NUM_PARAMETERS = {
    folder: num_parameters(DEMO / folder / "model.safetensors") for folder in ("model", "draft")
}
MILLIONS = f"{NUM_PARAMETERS['model'] / 1e6:.1f}"
CLAIMS |= {
    "demo/README.md": [
        f"a language model of {MILLIONS} million parameters",
        f"| parameters | {NUM_PARAMETERS['model']:,}, the embedding is the output, too | {NUM_PARAMETERS['draft']:,} |",
    ],
    "docs/guide/models.md": [
        f"a Llama of {MILLIONS} million parameters",
        *(f"| `{text}` | KL is below {bound:g} |" for bound, text in command.VERDICTS[:-1]),
        f"less than {command.WRONG_BELOW:.0%} of the likeliest tokens agree".replace("%", " %"),
        f"The {ours.NUM_TOP} tokens that the served model finds likeliest",
        f"{ours.NUM_GREEDY} tokens are chosen after each text",
    ],
    "CHANGELOG.md": [f"**The demo model**: {MILLIONS} million parameters"],
}
CLAIMS["docs/guide/structured.md"].append(
    f"{NUM_PARAMETERS['model'] / 1e6:.2f} M parameters, 3,072 tokens (the demo model)"
)


def in_one_line(name: str) -> str:
    return " ".join(Page(ROOT / name).text.split())


def table(name: str, heads: str) -> list[list[str]]:
    """The cells of the table with these heads."""
    lines = Page(ROOT / name).text.split(f"| {heads}", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def codes(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(("page", "claim"), [(page, claim) for page in CLAIMS for claim in CLAIMS[page]])
def test_the_page_says_what_the_code_has(page: str, claim: str) -> None:
    assert claim in in_one_line(page)


def test_families_of_models() -> None:
    makers = {re.split(r"[ -]\d|,| ", family.models)[0] for family in FAMILIES.values()}
    for page in ("docs/guide/models.md", "CHANGELOG.md"):
        assert all(re.search(rf"\b{maker}\b", Page(ROOT / page).text) for maker in makers), page
    of_gguf = table("docs/internals/quantization.md", "| read | refused")[0][1]
    kinds = {kind.split(" ")[0] for kind in re.split(r", (?!too)", of_gguf)}
    assert kinds == KINDS.keys()
    assert "forty-two architectures" in in_one_line("docs/guide/models.md")
    assert len(KINDS) == 42


def test_formats_of_checkpoints() -> None:
    methods = [row[0] for row in table("docs/internals/quantization.md", "`quant_method` |")]
    assert set(codes(methods)) == set(config.QUANT_METHODS)
    types = {
        name
        for row in table("docs/internals/quantization.md", "type of a tensor")
        for name in row[0].split(", ")
    }
    assert types == {kind.name for kind in TYPES.values() if kind.num_bytes}
    (said,) = re.findall(r"and GGUF \(([^)]*)\)", in_one_line("docs/guide/models.md"))
    assert set(said.split(", ")) == types


def test_levels_of_kernels() -> None:
    rows = table("docs/internals/kernels.md", "level | architecture")
    assert {row[0].strip("`") for row in rows} == {level.name for of in LEVELS.values() for level in of}
    needs = {level.name: set(level.needs) for level in LEVELS["x86_64"]}
    for name, _, said in rows:
        if level := needs.get(name.strip("`")):
            words = " ".join(codes([said])).split()
            assert set().union(*(needs.get(word, {word}) for word in words)) == level, name


def test_parsers_of_tools() -> None:
    rows = table("docs/guide/tools.md", "`--tool-parser`")
    assert {row[0].strip("`") for row in rows} == set(choices("tool_parser")) - {"auto"}
    rows = table("docs/guide/tools.md", "`--reasoning-parser`")
    assert {row[0].strip("`") for row in rows} == set(choices("reasoning_parser")) - {"auto", "none"}


def test_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((oldest, minor),) = re.findall(r"torch>=(\d+\.\d+),<2\.(\d+)", " ".join(project["dependencies"]))
    python = f"Python {project['requires-python'].strip('>=')} or later"
    assert f"{python}, PyTorch {oldest} to 2.{int(minor) - 1}" in in_one_line("docs/guide/install.md")
    assert python in in_one_line("README.md")
    extras = codes(row[0] for row in table("docs/guide/install.md", "extra | for"))
    assert {extra.removeprefix("penstock[").strip("]") for extra in extras} < project[
        "optional-dependencies"
    ].keys()


def test_the_readme_shows_what_the_laboratory_measured() -> None:
    measured = table("README.md", "workload | Penstock")
    laboratory = {row[0]: row for row in table("docs/laboratory/figures.md", "16 bits | Penstock")}
    for name, *cells in measured:
        own = laboratory[name.split(":")[0]]
        assert cells == [own[1], own[4], own[3]]
    ours, vllm, llama = (laboratory["W2"][column].split(";")[0] for column in (1, 4, 3))
    said = f"{ours} tokens a second from 16 streams on two AVX2 cores, where vLLM brings {vllm} and llama.cpp {llama}"
    assert said in in_one_line("README.md")


def test_the_size_of_the_page() -> None:
    later = {"temml", "penstock-math"}  # fetched when an answer has a formula
    own = [path for path in tracked() if path.parts[len(ROOT.parts)] == "static"]
    files = [path for path in own if not later & {*path.parts}]
    num_kb = sum(len(gzip.compress(path.read_bytes())) for path in files) / 1000
    (said,) = re.findall(r"less than (\d+) KB as it is sent", in_one_line("docs/guide/page.md"))
    assert 0.8 * int(said) < num_kb < int(said)


def test_workloads() -> None:
    rows = {
        name: " ".join(cells) for name, *cells in table("docs/laboratory/figures.md", "workload | streams")
    }
    for name, workload in WORKLOADS.items():
        numbers = [workload.streams, workload.seconds, workload.shared_tokens]
        numbers += [workload.prompt_tokens, workload.output_tokens]
        if beside := workload.interactive:
            numbers += [beside.prompt_tokens, beside.output_tokens]
        written = re.findall(r"\d+(?:,\d{3})*", rows[name])
        assert [int(number.replace(",", "")) for number in written] == [
            number for number in numbers if number
        ]


@pytest.mark.parametrize("page", pages(), ids=str)
def test_metrics_and_routes_exist(page: Page) -> None:
    metrics = set(re.findall(r"`(penstock_\w+)`", (FOLDER / "metrics.md").read_text()))
    named = set(re.findall(r"\bpenstock_[a-z]\w+", page.text))
    assert {name for name in named if re.sub("_(total|sum|count|bucket)$", "", name) not in metrics} == set()
    routes = [re.compile(re.sub(r"{\w+}", r"[^/]+", path)) for path in OPERATIONS]
    paths = {span.partition("?")[0] for span in page.spans if re.match(r"/(v\d|api)/\w", span)}
    assert {
        path for path in paths if "*" not in path and not any(route.fullmatch(path) for route in routes)
    } == set()
