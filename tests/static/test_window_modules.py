"""The pure modules of the window into the engine, in the browser that they are written for."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from tests.static.conftest import Call

NUMBERS = [
    ("number", None, "–"),
    ("number", 0, "0"),
    ("number", 0.42, "0.4"),
    ("number", 7, "7"),
    ("number", 38.4, "38"),
    ("number", 12_345.6, "12,346"),
    ("percent", None, "–"),
    ("percent", 0, "0 %"),
    ("percent", 0.333, "33 %"),
    ("percent", 0.9996, "99.9 %"),
    ("percent", 1, "100 %"),
    ("ordinal", 1, "1st"),
    ("ordinal", 2, "2nd"),
    ("ordinal", 3, "3rd"),
    ("ordinal", 11, "11th"),
    ("ordinal", 113, "113th"),
    ("ordinal", 121, "121st"),
    ("ago", 0, "now"),
    ("ago", 12.5, "13 s ago"),
]


def test_numbers_are_written_as_people_read_them(call: Call) -> None:
    found = call("format.js", "return args[0].map(([f, x]) => m[f](x));", [case[:2] for case in NUMBERS])
    assert found == [case[2] for case in NUMBERS]


def sample(output: int, hits: int = 0, queries: int = 0, seconds: float = 0.5) -> dict[str, Any]:
    steps = {
        "output_tokens": output,
        "num_steps": 4,
        "prefix_hit_tokens": hits,
        "prefix_query_tokens": queries,
    }
    return {"seconds": seconds, "steps": steps}


def test_a_minute_is_kept_with_its_gaps_and_without_those_of_slow_events(call: Call) -> None:
    pushed = [
        [sample(10), 0],
        [sample(20), 500],
        [sample(30), 2_300],
        [sample(40), 8_300],
        [sample(5, seconds=0), 8_800],
    ]
    rates = call(
        "window/history.js",
        """const history = new m.History();
        for (const [sample, at] of args[0]) history.push(sample, at);
        return history.series(m.perSecond("output_tokens"));""",
        pushed,
    )
    assert len(rates) == 120
    assert [rate for rate in rates if rate is not None] == [20, 40, 60, 80]
    assert rates[-14:] == [60, *[None] * 11, 80, None]  # 6 s without an event are 11 that are missing
    assert rates[-17:-14] == [None, 20, 40]


def test_ratios_are_of_the_last_ten_seconds(call: Call) -> None:
    samples = [sample(0, 8, 10), sample(0), None, sample(0, 0, 10), *[sample(0)] * 20]
    ratios = call(
        "window/history.js",
        'return m.trailingRatio(args[0], "prefix_hit_tokens", "prefix_query_tokens");',
        samples,
    )
    assert ratios == [0.8, 0.8, None, *[0.4] * 17, *[0] * 3, None]


def test_a_table_has_means_and_leaves_out_what_nobody_saw(call: Call) -> None:
    series = [[*[None] * 9, 4, *[None] * 10, *range(10)], [*[None] * 20, *[1] * 5, *[None] * 5]]
    assert call("window/history.js", "return m.tableRows(args[0]);", series) == [
        {"secondsAgo": 0, "means": [4.5, 1]},
        {"secondsAgo": 10, "means": [4, None]},
    ]


TOPS = [
    (0, 1, 1),
    (0.3, 1, 1),
    (1, 1, 1),
    (1.01, 1, 1.5),
    (11, 1, 15),
    (99, 10, 100),
    (3, 20, 20),
    (1074, 10, 1500),
]


def test_the_upper_edge_is_a_round_number(call: Call) -> None:
    tops = call(
        "window/shapes.js",
        "return args[0].map(([most, least]) => m.niceTop(most, least));",
        [t[:2] for t in TOPS],
    )
    assert tops == [t[2] for t in TOPS]


def test_lines_stop_at_gaps_and_areas_stand_on_each_other(call: Call) -> None:
    size = {"width": 40, "height": 10, "top": 10}
    found = call(
        "window/shapes.js",
        """const [values, size] = args;
        const [low, high] = m.stack(values).map((one) => m.stretches(one, size));
        return [m.linePath(low), m.areaPath(low, size.height), m.areaPath(high, size.height, low)];""",
        [[5, 5, None, 0, 20], [1, None, None, 2, 3]],
        size,
    )
    assert found == [
        "M0,5L10,5M30,10L40,0",
        "M0,5L10,5L10,10L0,10ZM30,10L40,0L40,10L30,10Z",
        "M0,4L10,5L10,5L0,5ZM30,8L40,0L40,0L30,10Z",
    ]
    assert call("window/shapes.js", "return m.linePath([[[3, 4]]]);") == "M3,4h.6"


def test_the_blocks_are_read_and_stand_as_water_in_a_tank(call: Call) -> None:
    def encoded(*numbers: int) -> str:
        return b64encode(bytes(numbers)).decode()

    told = {
        "num_blocks": 96,
        "blocks_per_cell": 32,
        "held": encoded(255, 1, 0),
        "shared": encoded(128, 0, 0),
        "cached": encoded(0, 2, 0),
        "holders": encoded(9, 1, 0),
        "num_held": 33,
        "num_shared": 16,
        "num_cached": 1,
        "num_saved": 40,
    }
    script = """const blocks = m.decodeBlocks(args[0]);
        return [blocks.numbers, [0, 1, 2].map((i) => m.levels(blocks, i, 10)), [...blocks.holders]];"""
    numbers, levels, holders = call("window/blocks.js", script, told)
    assert numbers == {"shared": 16, "alone": 17, "cached": 1, "free": 62}
    assert levels == [
        {"shared": 5, "held": 10, "cached": 10},
        {"shared": 0, "held": 1, "cached": 2},
        {"shared": 0, "held": 0, "cached": 0},
    ]
    assert holders == [9, 1, 0]
    assert call("window/blocks.js", "return [0, 1, 2, 8, 32, 200].map(m.strength);") == [0, 0, 0, 0.5, 1, 1]


def test_any_number_of_cells_fits_its_field(call: Call) -> None:
    cases = [(count, width, 232) for count in (1, 32, 960, 1024) for width in (250, 400, 800)]
    fits = call("window/blocks.js", "return args[0].map((one) => m.fit(...one));", cases)
    for (count, width, height), fit in zip(cases, fits, strict=True):
        assert fit["columns"] * fit["side"] <= width
        assert fit["rows"] * fit["side"] <= height
        assert fit["columns"] * fit["rows"] >= count


def test_a_set_of_steps_in_one_sentence(call: Call) -> None:
    steps = {
        "duration_ms": [4, 6],
        "prefill": [0, 30],
        "decode": [2, 3],
        "drafts": [4, 0],
        "accepted": [3, 0],
    }
    sentence = call("window/steps.js", "return m.summary(m.rowsOf(args[0]));", steps)
    assert sentence == (
        "The last 2 steps took 5 ms each, with 2.5 sequences and 15 prompt tokens; 3 of 4 drafts were right."
    )
    assert call("window/steps.js", "return m.summary([]);") == "No step since this view was opened."


STANDINGS = [
    (100, 1000, "kept"),
    (800, 1000, "close"),
    (1200, 1000, "over"),
    (9, None, "none"),
    (None, 9, "none"),
]


def test_how_a_lane_stands_to_its_promise(call: Call) -> None:
    lanes = [
        {"forecast_ttft_ms": forecast, "promised_ttft_ms": promised} for forecast, promised, _ in STANDINGS
    ]
    found = call("window/lanes.js", "return args[0].map(m.standing);", lanes)
    assert found == [standing for *_, standing in STANDINGS]


TIMINGS = {
    "queue_ms": 10,
    "ttft_ms": 40,
    "predicted_ttft_ms": 50,
    "prompt_tokens": 48,
    "cached_tokens": 16,
    "draft_tokens": 4,
    "accepted_tokens": 3,
    "preemptions": 1,
    "timeline": {
        "prefills": [[25, 16], [40, 16], [95, 8]],
        "preempted_ms": [60],
        "resumed_ms": [80],
        "drafts": [[50, 4, 3]],
        "ended_ms": 120,
    },
}


def test_the_spans_of_an_answer_that_gave_way_once(call: Call) -> None:
    found = call("window/spans.js", "return m.spansOf(args[0]);", TIMINGS)
    assert [(span["kind"], span["from"], span["to"]) for span in found["spans"]] == [
        ("queued", 0, 10),
        ("prefill", 10, 25),
        ("prefill", 25, 40),
        ("decode", 40, 60),
        ("away", 60, 80),
        ("prefill", 80, 95),
        ("decode", 95, 120),
    ]
    assert found["drafts"] == [{"at": 50, "drafted": 4, "accepted": 3}]


def test_an_answer_that_was_away_at_its_end(call: Call) -> None:
    timeline = TIMINGS["timeline"] | {"prefills": [[40, 32]], "resumed_ms": []}  # type: ignore[operator]
    found = call("window/spans.js", "return m.spansOf(args[0]).spans;", TIMINGS | {"timeline": timeline})
    assert [span["kind"] for span in found] == ["queued", "prefill", "decode", "away"]
    assert found[-1]["to"] == 120


def test_ticks_are_put_on_the_servers_clock_and_thinned(call: Call) -> None:
    assert call("window/spans.js", "return m.aligned([1000, 1010, 1050], 40);") == [40, 50, 90]
    assert call("window/spans.js", "return m.aligned([], 40);") == []
    thinned = call("window/spans.js", "return m.thinned(Array.from({length: 1000}, (_, i) => i), 5);")
    assert thinned == [0, 250, 500, 749, 999]


def test_the_strip_in_words_and_as_rows(call: Call) -> None:
    sentence, rows = call(
        "window/timeline.js",
        """const { spans, drafts } = (await import("/static/window/spans.js")).spansOf(args[0]);
        return [m.sentence(args[0], spans), m.rows(args[0], spans, drafts)];""",
        TIMINGS,
    )
    assert sentence == (
        "Timeline: queued 10 ms; 32 of 48 prompt tokens computed in 3 steps; first token after 40 ms, predicted "
        "50 ms; 3 of 4 drafts accepted; preempted 1 time."
    )
    assert [row["what"] for row in rows] == [
        "queued",
        "16 prompt tokens computed",
        "16 prompt tokens computed",
        "first token",
        "tokens",
        "4 drafts, 3 accepted",
        "preempted",
        "8 prompt tokens computed",
        "tokens",
    ]
