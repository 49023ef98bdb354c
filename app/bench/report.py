"""The bench's figures as tables."""

from __future__ import annotations

import math
from typing import Any

from app.bench.ceilings import LABELS, Ceilings
from app.bench.promise import PROMISE_S
from app.bench.statistics import gains, number, table
from app.bench.store import RATE, STREAMS

Row = dict[str, Any]

_STREAM_HEAD = ["tok/s", "TTFT P50", "P99 ms", "ITL P50", "P99 ms", "GFLOP/s"]


def print_report(results: Row) -> None:
    machine = results["machine"]
    print(f"\n{machine['processor']}, {machine['cores']} cores\n")
    if results["http"] or results["generate"]:
        head = ["model, dtype, streams", *_STREAM_HEAD, "of linear", "x generate", "loop us/token"]
        rows = [_generate_row(row, len(head)) for row in results["generate"]]
        print(table(head, rows + [_http_row(row, results) for row in results["http"]]), end="\n\n")
    if results["linear"]:
        rows = [[_name(row), number(row["gflop_per_s"])] for row in results["linear"]]
        print(table(["linear operators alone, rows", "GFLOP/s"], rows), end="\n\n")
    if results["prefix"]:
        print(
            table(["shared prefix", "tokens", "cold ms", "hit ms", "ratio"], _prefix_rows(results)),
            end="\n\n",
        )
    if "plan" in results:
        plan = results["plan"]
        print(
            f"host time of a step of {plan['sequences']} sequences: {number(plan['host_p50_ms'])} ms P50,"
            f" {number(plan['host_p99_ms'])} ms P99"
        )
    if "routing" in results:
        _print_routing(results["routing"])
    if "promise" in results:
        _print_promise(results["promise"])
    if "drafts" in results:
        _print_drafts(results["drafts"])
        _print_depths(results["depths"])
    if "formats" in results:
        _print_formats(results["formats"])
    if "store" in results:
        _print_store(results["store"])
    _print_failures(results)


def _print_drafts(rows: list[Row]) -> None:
    head = ["drafts: model, text, temperature, streams", "tok/s", "without", "ratio", "right of drafts"]
    print()
    print(
        table(
            head,
            [
                [
                    f"{row['model']}, {row['text']}, {row['temperature']:g}, {row['streams']}",
                    number(row["tokens_per_s"]),
                    number(row["without"]),
                    f"{row['ratio']:.2f}",
                    ", ".join(
                        f"{name} {right / drafted:.0%} of {drafted}"
                        for name, (drafted, right) in row["drafts"].items()
                    ),
                ]
                for row in rows
            ],
        )
    )


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


def _print_promise(promise: Row) -> None:
    head = [
        f"promise {PROMISE_S:g} s",
        "requests",
        "refused",
        "kept",
        "TTFT P50",
        "P90",
        "P99 ms",
        "worst gap ms",
        "tok/s",
    ]
    parts = {
        "interactive, alone": "alone",
        "interactive, beside batch": "beside",
        "interactive, overload": "overload",
        "batch, alone": "batch",
        "batch, beside interactive": "beside_batch",
    }
    print(
        "\n" + table(head, [_promise_row(label, promise[part]) for label, part in parts.items()]), end="\n\n"
    )
    overload, replay = promise["overload"], promise["replay"]
    print(
        f"overload: {number(overload['capacity_per_s'])} requests/s can be served, "
        f"{number(overload['offered_per_s'])} came; "
        f"refusals took {number(overload['refused_p50_ms'])} ms P50, {number(overload['refused_p99_ms'])} ms P99"
    )
    keys = ("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s")
    served, said = ([number(replay[who][key]) for key in keys] for who in ("served", "simulated"))
    print(
        "\n"
        + table(
            ["replay of a trace", "TTFT P50", "P90 ms", "tok/s"], [["served", *served], ["simulated", *said]]
        )
    )


def _promise_row(label: str, row: Row) -> list[str]:
    kept = "-" if math.isnan(row["kept"]) or label.startswith("batch") else f"{row['kept']:.0%}"
    keys = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "longest_gap_ms", "tokens_per_s")
    return [label, str(row["requests"]), str(row["refused"]), kept, *(number(row[key]) for key in keys)]


def _print_formats(rows: list[Row]) -> None:
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


def _print_store(store: Row) -> None:
    head = [f"{STREAMS} streams, tok/s", "no Redis", "Redis", "ratio", "resumable", "ratio"]
    print("\n" + table(head, [_store_row(row) for row in store["streams"]]), end="\n\n")
    rows = [
        [row["redis"], str(row["requests"]), number(row["ttft_p50_ms"]), number(row["ttft_p99_ms"])]
        for row in store["trouble"]
    ]
    print(table([f"Redis, {RATE} requests/s", "requests", "TTFT P50", "P99 ms"], rows))


def _store_row(row: Row) -> list[str]:
    rates, ratios = row["tokens_per_s"], row["ratio"]
    cells = [row["model"], number(rates["without"])]
    for kind in ("plain", "resumable"):
        cells += [number(rates[kind]), f"{ratios[kind]:.3f}"]
    return cells


def print_workloads(results: Row) -> None:
    _print_ceilings(results)
    head = ["workload, dtype", *_STREAM_HEAD, "refused", "at most tok/s", "reached"]
    rows = []
    for row in results["http"]:
        most, label = row["most_tokens_per_s"], f"{row['workload']}, {row['dtype']}"
        share = f"{row['tokens_per_s'] / most:.0%}"
        rows.append([label, *_stream_cells(row), str(row["refused"]), number(most), share])
        if "interactive" in row:
            beside = row["interactive"] | {"gflop_per_s": math.nan}
            refused = f"{beside['refused']} of {beside['requests']}"
            rows.append([f"{label}, interactive", *_stream_cells(beside), refused, "-", "-"])
    print(table(head, rows))
    print(
        "\nat most: the arithmetic and the bytes of the workload at the rates above, whichever takes longer"
    )
    _print_failures(results)


def print_parts(results: Row) -> None:
    """A table for each case: what every part takes, and below which no machine with these rates could come."""
    _print_ceilings(results)
    ceilings = Ceilings(**results["ceilings"])
    head = ["ms", "share", "waiting", "GFLOP/s", "GB/s", "floor ms"]
    for case in results["parts"]:
        name = f"{case['model']}, {case['dtype']}: {case['case']}"
        parts = sorted(case["parts"], key=lambda part: -float(part["ms"]))
        rows = [_part_row(part, case, ceilings) for part in parts]
        floor_ms = sum(_floor_ms(part["work"], ceilings) for part in parts if part["work"])
        rows.append(["all", number(case["ms"]), "", "", "", "", number(floor_ms)])
        print(table([name, *head], rows))
        print(f"a whole step that is not timed: {number(case['untimed_ms'])} ms", end="\n\n")


def _part_row(part: Row, case: Row, ceilings: Ceilings) -> list[str]:
    waiting = "-" if part["waiting"] is None else f"{part['waiting']:.0%}"
    cells = [part["part"], number(part["ms"]), f"{part['ms'] / case['ms']:.1%}", waiting]
    if part["work"] is None:
        return [*cells, "-", "-", "-"]
    rates = [part["work"][what] / part["ms"] / 1e6 for what in ("flop", "bytes")]
    return [*cells, *map(number, rates), number(_floor_ms(part["work"], ceilings))]


def _floor_ms(work: Row, ceilings: Ceilings) -> float:
    return 1000 * ceilings.floor_s(work["flop"], work["bytes"], work["factor_bytes"])


def _print_ceilings(results: Row) -> None:
    machine, ceilings = results["machine"], results["ceilings"]
    print(f"\n{machine['processor']}, {machine['cores']} cores\n")
    rows = [["reading memory", f"{number(ceilings['memory_gb_per_s'])} GB/s"]]
    rows += [[LABELS[name], f"{number(peak)} G/s"] for name, peak in ceilings["peaks"].items() if peak]
    print(table(["what all cores can do", "rate"], rows), end="\n\n")


def _name(row: Row) -> str:
    return f"{row['model']}, {row['dtype']}, {row['streams']}"


def _stream_cells(row: Row) -> list[str]:
    keys = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "gflop_per_s")
    return [number(row[key]) for key in keys]


def _generate_row(row: Row, num_columns: int) -> list[str]:
    cells = [f"{row['model']}, generate", number(row["tokens_per_s"])]
    return cells + [""] * (num_columns - len(cells))


def _http_row(row: Row, results: Row) -> list[str]:
    alone = _find(results["linear"], row, ("model", "dtype", "streams"), "gflop_per_s")
    generate = _find(results["generate"], row, ("model",), "tokens_per_s")
    share = row["gflop_per_s"] / alone
    return [
        _name(row),
        *_stream_cells(row),
        "-" if math.isnan(share) else f"{share:.0%}",
        number(row["tokens_per_s"] / generate),
        number(row["loop_cpu_us_per_token"]),
    ]


def _find(rows: list[Row], like: Row, keys: tuple[str, ...], value: str) -> float:
    found = (row[value] for row in rows if all(row[key] == like[key] for key in keys))
    return float(next(found, math.nan))


def _prefix_rows(results: Row) -> list[list[str]]:
    return [
        [
            row["model"],
            str(row["shared_tokens"]),
            number(row["ttft_cold_p50_ms"]),
            number(row["ttft_hit_p50_ms"]),
            number(row["ratio"]),
        ]
        for row in results["prefix"]
    ]


def _print_failures(results: Row) -> None:
    store = results.get("store", {"streams": [], "trouble": []})
    rows = [(_name(row), row) for row in results["http"]]
    rows += [(f"{row['model']}, {row['streams']} streams", row) for row in store["streams"]]
    rows += [(f"Redis: {row['redis']}", row) for row in store["trouble"]]
    for name, row in rows:
        if row["failed"]:
            print(f"{name}: {row['failed']} of {row['requests']} requests failed: {row['first_error']}")


def _print_routing(routing: dict[str, float]) -> None:
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
