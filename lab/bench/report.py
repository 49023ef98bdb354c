"""The figures of `python -m lab.bench` as tables."""

from __future__ import annotations

import math
from typing import Any

from lab.bench.decisions import WAYS
from lab.bench.depth import gains
from lab.bench.scraping import SCRAPES_PER_S
from lab.bench.store import RATE, STREAMS
from penstock.app.bench.ceilings import Ceilings
from penstock.app.bench.report import print_ceilings, print_failures
from penstock.app.tables import number, table

Row = dict[str, Any]


def print_linear(rows: list[Row]) -> None:
    cells = [
        [f"{row['model']}, {row['dtype']}, {row['streams']}", number(row["gflop_per_s"])] for row in rows
    ]
    print(table(["linear operators alone, rows", "GFLOP/s"], cells))


def print_planning(plan: Row) -> None:
    print(
        f"host time of a step of {plan['sequences']} sequences of {plan['context']} tokens: "
        f"{number(plan['host_p50_ms'])} ms P50, {number(plan['host_p99_ms'])} ms P99"
    )


def print_drafts(figures: Row) -> None:
    _print_gains(figures["drafts"])
    _print_depths(figures["depths"])


def _print_gains(rows: list[Row]) -> None:
    head = ["drafts: model, text, temperature, streams", "tok/s", "without", "ratio", "right of drafts"]
    print("\n" + table(head, [_gain_row(row) for row in rows]))


def _gain_row(row: Row) -> list[str]:
    name = f"{row['model']}, {row['text']}, {row['temperature']:g}, {row['streams']}"
    rates = [number(row["tokens_per_s"]), number(row["without"]), f"{row['ratio']:.2f}"]
    counts = [
        f"{name} {right / drafted:.0%} of {drafted}" for name, (drafted, right) in row["drafts"].items()
    ]
    return [name, *rates, ", ".join(counts)]


def _print_depths(rows: list[Row]) -> None:
    """Tokens of a sequence in a step, beside those of independent drafts, and tokens a second as multiples of k = 0."""
    lines = []
    for row, gain in zip(rows, gains(rows), strict=True):
        per_step = row["num_tokens"] / max(1, row["num_steps"] * row["streams"])
        lines.append(
            [
                f"{row['streams']}, {row['temperature']:g}, {row['length']}",
                " ".join(f"{share:.2f}" for share in row["acceptance"]),
                f"{per_step:.2f}",
                f"{row['expected']:.2f}",
                f"{1000 * row['seconds'] / max(1, row['num_steps']):.2f}",
                f"{gain:.2f}" if gain else "",
            ]
        )
    if lines:
        print()
        print(
            table(
                [
                    "streams, temperature, k",
                    "right by position",
                    "tokens",
                    "if each alone",
                    "ms a step",
                    "gain",
                ],
                lines,
            )
        )


def print_formats(rows: list[Row]) -> None:
    head = ["formats: layers alone", "MiB", "of file", "loading +MiB", "a layer"]
    head += ["1 row ms", "GB/s", "ratio", "64 rows ms", "ratio"]
    by_name = {(row["shape"], row["name"]): row["seconds"] for row in rows}
    lines = []
    for row in rows:
        seconds, like = row["seconds"], by_name[row["shape"], row["like"]]
        is_like = row["name"] == row["like"]
        lines.append(
            [
                f"{row['shape']}, {row['name']}",
                number(row["packed"] / 2**20),
                "" if is_like else f"{row['packed'] / row['stored']:.2f}",
                number(row["beside"] / 2**20),
                number(row["layer"] / 2**20),
                number(1000 * seconds["1 row"]),
                number(row["packed"] / seconds["1 row"] / 1e9),
                "" if is_like else f"{like['1 row'] / seconds['1 row']:.2f}",
                number(1000 * seconds["64 rows"]),
                "" if is_like else f"{like['64 rows'] / seconds['64 rows']:.2f}",
            ]
        )
    print("\n" + table(head, lines))
    print(
        "\nratio: the speed beside --quantize of the same width; +MiB: taken while loading, beside what stays"
    )


def print_decisions(rows: list[Row]) -> None:
    head = [
        "decisions a second: model, questions",
        "decisions",
        "chats",
        "32 at once",
        "ratio",
        "of 32",
        "CPU ms",
        "of 32",
    ]
    lines = [
        [
            f"{row['model']}, {row['questions']}",
            *(number(row["per_s"][way]) for way in WAYS),
            *(f"{row['per_s']['decisions'] / row['per_s'][way]:.1f}" for way in WAYS[1:]),
            *(number(row["cpu_ms"][way]) for way in (WAYS[0], WAYS[2])),
        ]
        for row in rows
    ]
    print("\n" + table(head, lines))


def print_store(store: Row) -> None:
    head = [f"{STREAMS} streams, tok/s", "no Redis", "Redis", "ratio", "resumable", "ratio"]
    print("\n" + table(head, [_store_row(row) for row in store["streams"]]), end="\n\n")
    rows = [
        [row["redis"], str(row["requests"]), number(row["ttft_p50_ms"]), number(row["ttft_p99_ms"])]
        for row in store["trouble"]
    ]
    print(table([f"Redis, {RATE} requests/s", "requests", "TTFT P50", "P99 ms"], rows))
    print_failures((f"{row['model']}, {row['streams']} streams", row) for row in store["streams"])
    print_failures((f"Redis: {row['redis']}", row) for row in store["trouble"])


def _store_row(row: Row) -> list[str]:
    rates, ratios = row["tokens_per_s"], row["ratio"]
    cells = [row["model"], number(rates["without"])]
    for kind in ("plain", "resumable"):
        cells += [number(rates[kind]), f"{ratios[kind]:.3f}"]
    return cells


def print_scraping(rows: list[Row]) -> None:
    head = ["", "streams", "tok/s", f"{SCRAPES_PER_S} scrapes/s", "ratio", "CPU of a scrape, ms"]
    print(
        "\n"
        + table(
            head,
            [
                [
                    row["model"],
                    str(row["streams"]),
                    number(row["without"]),
                    number(row["scraped"]),
                    f"{row['ratio']:.3f}",
                    number(row["cpu_ms"]),
                ]
                for row in rows
            ],
        )
    )


def print_parts(results: Row) -> None:
    """A table for each case: what every part takes, below which no machine with these rates could come, and how near
    to that it is."""
    print_ceilings(results["ceilings"])
    ceilings = Ceilings(**results["ceilings"])
    head = ["ms", "share", "waiting", "GFLOP/s", "GB/s", "floor ms", "of limit"]
    for case in results["parts"]:
        name = f"{case['model']}, {case['dtype']}: {case['case']}"
        parts = sorted(case["parts"], key=lambda part: -float(part["ms"]))
        rows = [_part_row(part, case, ceilings) for part in parts]
        floor_ms = sum(_floor_ms(part["work"], ceilings) for part in parts if part["work"])
        rows.append(["all", number(case["ms"]), "", "", "", "", *_limit(floor_ms, case["ms"])])
        print(table([name, *head], rows))
        print(f"a whole step that is not timed: {number(case['untimed_ms'])} ms", end="\n\n")


def _part_row(part: Row, case: Row, ceilings: Ceilings) -> list[str]:
    waiting = "-" if part["waiting"] is None else f"{part['waiting']:.0%}"
    cells = [part["part"], number(part["ms"]), f"{part['ms'] / case['ms']:.1%}", waiting]
    if part["work"] is None:
        return [*cells, "-", "-", "-", "-"]
    rates = [part["work"][what] / part["ms"] / 1e6 for what in ("flop", "bytes")]
    return [*cells, *map(number, rates), *_limit(_floor_ms(part["work"], ceilings), part["ms"])]


def _limit(floor_ms: float, ms: float) -> list[str]:
    """The least time, and the share of the machine's rates that was reached; neither where no rate is known."""
    return ["-", "-"] if math.isnan(floor_ms) else [number(floor_ms), f"{floor_ms / ms:.0%}"]


def _floor_ms(work: Row, ceilings: Ceilings) -> float:
    return 1000 * ceilings.floor_s(work["flop"], work["bytes"], work["factor_bytes"])


def print_routing(routing: dict[str, float]) -> None:
    print(
        f"a choice among {routing['replicas']:,} replicas, {routing['decisions']:,} requests of"
        f" {routing['sessions']:,} sessions: {number(routing['choice_p50_us'])} us P50,"
        f" {number(routing['choice_p90_us'])} us P90, {number(routing['choice_p99_us'])} us P99;"
        f" {routing['hit_rate']:.0%} of the prompt tokens found\n"
        f"a push: {number(routing['push_p50_us'])} us P50. A block that is known: {number(routing['block_bytes'])} B,"
        f" held by all {number(routing['shared_block_bytes'])} B; {routing['blocks']:,} known at the end\n"
        f"the blocks of {routing['kept_sessions']:,} sessions: {routing['kept_part']:.0%} of them are kept,"
        f" {routing['kept_blocks']:,}, in {routing['kept_bytes'] / 2**20:,.0f} MiB"
    )
