"""Metrics in Prometheus's text format, at the price of what changed since the last scrape.

A picker scrapes every 50 ms. prometheus_client takes 7 ms of the event loop for a server's thousand samples, and twice
that with vLLM's names. Here the text of each series is kept until its value changes. For one thread.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Generic, Literal, TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Gauge:
    """A value that rises and falls."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)

    @contextlib.contextmanager
    def track_inprogress(self) -> Iterator[None]:
        """While this is entered, the value is larger by 1."""
        self.inc()
        try:
            yield
        finally:
            self.inc(-1.0)

    @property
    def version(self) -> float:
        """Changes whenever a sample does."""
        return self.value

    def names(self, name: str) -> list[tuple[str, Mapping[str, str]]]:
        """Returns the name and the additional labels of each sample of a metric with this name."""
        return [(name, {})]

    def samples(self) -> Iterable[float]:
        return (self.value,)


class Counter(Gauge):
    """A value that only rises."""

    __slots__ = ()


class Histogram:
    """The numbers of values up to each bound. A value is taken many times at the cost of once."""

    __slots__ = ("_bounds", "_counts", "_num_taken", "_sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = (*map(float, bounds), math.inf)
        self._counts = [0] * len(self._bounds)
        self._num_taken = 0
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._num_taken += times

    @property
    def version(self) -> float:
        return self._num_taken

    def names(self, name: str) -> list[tuple[str, Mapping[str, str]]]:
        buckets = [(f"{name}_bucket", {"le": _number(bound)}) for bound in self._bounds]
        return [*buckets, (f"{name}_count", {}), (f"{name}_sum", {})]

    def samples(self) -> Iterable[float]:
        yield from map(float, accumulate(self._counts))
        yield float(self._num_taken)
        yield self._sum


Instrument = Gauge | Histogram
"""The measurements of one combination of labels."""
Kind = Literal["counter", "gauge", "histogram"]
InstrumentT = TypeVar("InstrumentT", bound=Instrument, covariant=True)


class Metric(Generic[InstrumentT]):
    """A metric: an instrument for each combination of its labels' values."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        documentation: str,
        labels: Sequence[str],
        make: Callable[[], InstrumentT],
    ) -> None:
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self.label_names = tuple(labels)
        self.instruments: dict[tuple[str | int, ...], InstrumentT] = {}
        self._make = make

    def labels(self, *values: str | int) -> InstrumentT:
        """Returns the instrument of these labels; the same one at each call."""
        if (instrument := self.instruments.get(values)) is None:
            instrument = self.instruments[values] = self._make()
        return instrument


class Exposition:
    """The metrics of one process, as they are scraped."""

    def __init__(self, prefix: str) -> None:
        """`prefix` begins the name of each metric that is made here."""
        self.metrics: dict[str, Metric[Instrument]] = {}
        """The metrics that were made here, by their names without the prefix."""
        self._prefix = prefix
        self._views: list[_View] = []

    def _add(self, metric: Metric[InstrumentT]) -> Callable[..., InstrumentT]:
        self.metrics[metric.name] = metric
        self.show(metric, self._prefix + metric.name)
        return metric.labels

    def named(self) -> Iterator[tuple[str, Metric[Instrument]]]:
        """Yields the metrics that were made here by their full names."""
        for name, metric in self.metrics.items():
            yield self._prefix + name, metric

    def show(
        self,
        metric: Metric[InstrumentT],
        name: str,
        labels: Mapping[str, str] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Shows a metric under a name, with more labels, and other names for some of its own."""
        self._views.append(_View(metric, name, labels or {}, renamed or {}))

    def counter(self, name: str, documentation: str) -> Counter:
        return self.counters(name, documentation, ())()

    def counters(self, name: str, documentation: str, labels: Sequence[str]) -> Callable[..., Counter]:
        """Returns a function from labels to their counter."""
        return self._add(Metric(name, "counter", documentation, labels, Counter))

    def gauge(self, name: str, documentation: str) -> Gauge:
        return self.gauges(name, documentation, ())()

    def gauges(self, name: str, documentation: str, labels: Sequence[str]) -> Callable[..., Gauge]:
        """Returns a function from labels to their gauge."""
        return self._add(Metric(name, "gauge", documentation, labels, Gauge))

    def histogram(self, name: str, documentation: str, bounds: Iterable[float]) -> Histogram:
        return self.histograms(name, documentation, bounds, ())()

    def histograms(
        self, name: str, documentation: str, bounds: Iterable[float], labels: Sequence[str]
    ) -> Callable[..., Histogram]:
        """Returns a function from labels to their histogram."""
        bounds = tuple(bounds)
        return self._add(Metric(name, "histogram", documentation, labels, lambda: Histogram(bounds)))

    def render(self) -> bytes:
        return "".join([view.text() for view in self._views]).encode()


class _View:
    """A metric under one name."""

    def __init__(
        self, metric: Metric[Instrument], name: str, labels: Mapping[str, str], renamed: Mapping[str, str]
    ) -> None:
        self._metric = metric
        self._name = f"{name}_total" if metric.kind == "counter" else name
        self._labels = labels
        self._label_names = [renamed.get(label, label) for label in metric.label_names]
        help_text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        self._head = f"# HELP {self._name} {help_text}\n# TYPE {self._name} {metric.kind}\n"
        self._series: dict[tuple[str | int, ...], _Series] = {}

    def text(self) -> str:
        texts = [self._head]
        for values, instrument in self._metric.instruments.items():
            series = self._series.get(values)
            if series is None:
                series = self._series[values] = _Series(self._prefixes(values, instrument))
            texts.append(series.text(instrument))
        return "".join(texts)

    def _prefixes(self, values: tuple[str | int, ...], instrument: Instrument) -> list[str]:
        """Returns what comes before the value in each line."""
        labels = dict(zip(self._label_names, values, strict=True))
        return [
            f"{name}{_labels({**labels, **self._labels, **more})} "
            for name, more in instrument.names(self._name)
        ]


class _Series:
    """The lines of one instrument under one name."""

    __slots__ = ("_prefixes", "_text", "_version")

    def __init__(self, prefixes: list[str]) -> None:
        self._prefixes = prefixes
        self._version: float | None = None
        self._text = ""

    def text(self, instrument: Instrument) -> str:
        if (version := instrument.version) != self._version:
            self._version = version
            self._text = "".join(
                [
                    f"{prefix}{_number(value)}\n"
                    for prefix, value in zip(self._prefixes, instrument.samples(), strict=True)
                ]
            )
        return self._text


def _labels(labels: Mapping[str, str | int]) -> str:
    pairs = (f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(pairs)}}}" if labels else ""


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else f"{value:+}".title()
