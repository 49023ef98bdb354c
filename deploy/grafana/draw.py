"""`python -m deploy.grafana.draw docs/pictures/dashboard.png` draws the dashboard's panels from a minute of mixed load.

It starts a server and a Prometheus that scrapes it, sends the queries that Grafana would send, and draws the replies.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from deploy.grafana.make import PANELS, Query
from deploy.scraping import Prometheus
from loadtests.run import command
from penstock.app.bench.server_process import ServerProcess

LOAD_S = 60
_COLUMNS = 3
_INTERVAL = "10s"
"""Replaces Grafana's $__rate_interval."""


def draw(path: Path, prometheus: Prometheus, began_s: float, ended_s: float) -> None:
    rows = math.ceil(len(PANELS) / _COLUMNS)
    figure, places = plt.subplots(rows, _COLUMNS, figsize=(15, 2.6 * rows), layout="constrained")
    for axes, (title, text, unit, queries) in zip(places.flat, PANELS, strict=True):
        axes.set_title(title + (f" ({unit})" if unit != "none" else ""), fontsize=10, loc="left")
        axes.set_xlabel(text, fontsize=7)
        for query in queries:
            _draw_lines(axes, prometheus, query, began_s, ended_s)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        if axes.lines:
            axes.legend(fontsize=6, loc="upper left")
    figure.savefig(path, dpi=80)


def _draw_lines(axes: Axes, prometheus: Prometheus, query: Query, began_s: float, ended_s: float) -> None:
    expression, name = query
    found = prometheus.ask(
        "query_range",
        query=expression.replace("$__rate_interval", _INTERVAL),
        start=began_s,
        end=ended_s,
        step=1,
    )
    for line in found["result"]:
        times_s = [at_s - began_s for at_s, _ in line["values"]]
        axes.plot(times_s, [float(value) for _, value in line["values"]], label=_named(name, line["metric"]))


def _named(name: str, labels: Mapping[str, str]) -> str:
    """Fills labels into a legend; Prometheus leaves out labels that are empty."""
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label[1], ""), name).strip()


def main(path: Path) -> None:
    with (
        ServerProcess() as server,
        Prometheus(server.url) as prometheus,
        tempfile.TemporaryDirectory() as folder,
    ):
        began_s = time.time()
        load = ["--report", folder, "--load-shape", "double-wave", "--users", "48", "--spawn-rate", "8"]
        load += ["--run-time", f"{LOAD_S}s", "--stop-timeout", "30"]
        run = command(server.url, load)
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        draw(path, prometheus, began_s, time.time())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.draw", description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="the picture, as PNG")
    main(parser.parse_args().path)
