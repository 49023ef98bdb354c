"""The bench's figures as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from penstock.app.bench.ceilings import LABELS
from penstock.app.bench.promise import PROMISE_S
from penstock.app.tables import number, table

Row = dict[str, Any]

MOST_P99, LEAST_BATCH = 3, 0.9
"""The aims of W4: the interactive TTFT P99 over the P50 alone, and the rate of the batch over its rate alone."""
_STREAM_HEAD = ["tok/s", "TTFT P50", "P99 ms", "ITL P50", "P99 ms", "GFLOP/s"]


def print_report(results: Row) -> None:
    print_machine(results["machine"])
    if results["http"] or results["generate"]:
        head = ["model, dtype, streams", *_STREAM_HEAD, "x generate", "loop us/token"]
        rows = [_generate_row(row, len(head)) for row in results["generate"]]
        print(table(head, rows + [_http_row(row, results) for row in results["http"]]), end="\n\n")
    if results["prefix"]:
        print(
            table(["shared prefix", "tokens", "cold ms", "hit ms", "ratio"], _prefix_rows(results)),
            end="\n\n",
        )
    if "promise" in results:
        _print_promise(results["promise"])
    print_failures((_name(row), row) for row in results["http"])


def print_machine(machine: Row) -> None:
    print(f"\n{machine['processor']}, {machine['cores']} cores\n")


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


def print_workloads(results: Row) -> None:
    print_machine(results["machine"])
    print_ceilings(results["ceilings"])
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
    for row in results["http"]:
        if "alone" in row:
            print(_beside(row))
        if not math.isnan(row["kv_unfilled"]):
            print(f"{_name(row)}: of the KV in use, {row['kv_unfilled']:.1%} had no token, on average")
    print_failures((_name(row), row) for row in results["http"])


def _beside(row: Row) -> str:
    """How much the parts of a workload slow each other down."""
    alone, p99_ms = row["alone"], row["interactive"]["ttft_p99_ms"]
    p50_ms, rate = alone["interactive_ttft_p50_ms"], alone["tokens_per_s"]
    return (
        f"{row['workload']}, {row['dtype']}: the interactive P99 is {number(p99_ms / p50_ms)} times the P50 alone, "
        f"{number(p50_ms)} ms (aim: at most {MOST_P99:g}); the batch has {number(row['tokens_per_s'] / rate)} of its "
        f"rate alone, {number(rate)} tok/s (aim: {LEAST_BATCH:g})"
    )


def print_ceilings(ceilings: Row) -> None:
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
    rates = (other["tokens_per_s"] for other in results["generate"] if other["model"] == row["model"])
    generate = next(rates, math.nan)
    return [
        _name(row),
        *_stream_cells(row),
        number(row["tokens_per_s"] / generate),
        number(row["loop_cpu_us_per_token"]),
    ]


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


def print_failures(rows: Iterable[tuple[str, Row]]) -> None:
    """A line for each named row in which requests failed."""
    for name, row in rows:
        if row["failed"]:
            print(f"{name}: {row['failed']} of {row['requests']} requests failed: {row['first_error']}")
