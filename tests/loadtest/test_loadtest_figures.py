"""Workloads, and the figures computed from records."""

from __future__ import annotations

import random
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import StreamRecord
from loadtest.driver import Load
from loadtest.machine import describe_machine, tree_cpu_s
from loadtest.report import Run, format_table, render_html
from loadtest.scrape import differences, parse_samples
from loadtest.summary import percentile, summarize
from loadtest.svg import cumulative, line_chart
from loadtest.workloads import WORKLOADS, Shape, draw_lengths, make_requests, make_text


def record(due_s, *times_s, tokens, failure=None) -> StreamRecord:
    return StreamRecord(
        due_s=due_s,
        sent_s=due_s,
        end_s=times_s[-1],
        token_times_s=list(times_s),
        prompt_tokens=10,
        output_tokens=tokens,
        finish_reason="stop",
        failure=failure,
    )


def test_a_summary_by_hand():
    records = [
        record(0.0, 1.0, 2.0, 4.0, tokens=4),  # one event had two tokens
        record(1.0, 3.0, tokens=1),
        record(0.0, 100.0, tokens=50, failure="cut"),
    ]
    figures = summarize(records)
    assert (figures["requests"], figures["completed"], figures["failures"]) == (3, 2, {"cut": 1})
    assert figures["duration_s"] == 100.0
    assert (figures["output_tokens"], figures["output_events"]) == (5, 4)
    assert figures["output_tokens_per_s"] == 0.05
    assert figures["total_tokens_per_s"] == 0.25
    assert figures["ttft_ms"]["mean"] == pytest.approx(1500)
    assert figures["tpot_ms"] == pytest.approx(dict.fromkeys(figures["tpot_ms"], 1000))
    assert (figures["itl_ms"]["min"], figures["itl_ms"]["max"]) == pytest.approx((1000, 2000))
    assert figures["e2e_ms"]["max"] == pytest.approx(4000)


def test_a_run_in_which_nothing_came_has_no_latencies():
    figures = summarize([StreamRecord(end_s=1.0, failure="connect")])
    assert figures["ttft_ms"] is None
    assert figures["output_tokens_per_s"] == 0
    run = Run(Load(concurrency=1), [], {**figures, "client_cpu_cores": 0.0}, [])
    assert "FAILED: 1 connect" in format_table([run])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    numpy = pytest.importorskip("numpy")
    ours = percentile(sorted(values), percent)
    assert ours == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-6)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_repeat_by_seed_and_fit_the_context(workload):
    shape = Shape(workload, input_len=100, output_len=50, max_total=300)
    drawn = draw_lengths(shape, 200, random.Random(1))
    assert drawn == draw_lengths(shape, 200, random.Random(1))
    assert (drawn != draw_lengths(shape, 200, random.Random(2))) == (workload in ("random", "chat"))
    assert all(item.own > 0 and item.output > 0 for item in drawn)
    assert all(item.shared + item.own + item.output <= 300 for item in drawn)
    pool = range(1000, 2000)
    asks = make_requests(drawn, random.Random(1), token_pool=pool)
    assert [len(ask.prompt) for ask in asks] == [item.shared + item.own for item in drawn]
    assert len({tuple(ask.prompt) for ask in asks}) == len(asks)


def test_shared_prefixes_are_shared_and_conversations_are_mostly_short():
    shape = Shape("shared-prefix", input_len=40, output_len=5, prefix_len=30)
    for pool in (range(100), None):
        asks = make_requests(
            draw_lengths(shape, 9, random.Random(0)), random.Random(0), token_pool=pool
        )
        prefixes = {str(ask.prompt)[:60] for ask in asks}
        assert len(prefixes) == 1
        assert len({str(ask.prompt) for ask in asks}) == 9
    chat = draw_lengths(Shape("chat", input_len=200, output_len=200), 4000, random.Random(0))
    lengths = sorted(item.own for item in chat)
    assert sum(lengths) / 4000 == pytest.approx(200, rel=0.1)
    assert lengths[2000] < 150 < 500 < lengths[3800]


def test_text_has_as_many_words_as_asked_for():
    rng = random.Random(0)
    assert [len(make_text(count, rng).split()) for count in (1, 9, 10, 11, 57)] == [
        1,
        9,
        10,
        11,
        57,
    ]


def test_what_the_server_tells():
    page = (
        "# HELP quire:x about\n"
        'quire:prefix_cache_queries_total{engine="0",model_name="a b"} 10.0\n'
        'quire:prefix_cache_queries_total{engine="1",model_name="{}"} 5\n'
        'quire:prefix_cache_hits_total{engine="0"} 3\n'
        "quire:spec_decode_num_drafts_total 10\nquire:spec_decode_num_draft_tokens_total 40\n"
        "quire:spec_decode_num_accepted_tokens_total 25\n"
        "quire:kv_slots_held_total 100\nquire:kv_slots_wasted_total 4\n"
        'quire:ttft_bucket{le="1"} 9\nother:metric 1\nprocess_cpu_seconds_total 3\n'
    )
    after = parse_samples(page)
    assert after["prefix_cache_queries"] == 15
    assert "ttft_bucket" not in after
    before = {"prefix_cache_queries": 5.0, "prefix_cache_hits": 1.0, "kv_slots_held": 50.0}
    told = differences(before, after)
    assert told["prefix_hit_rate"] == pytest.approx(0.2)
    assert told["kv_waste"] == pytest.approx(0.08)
    assert told["acceptance"] == pytest.approx(25 / 40)
    assert told["accepted_length"] == pytest.approx(2.5)
    assert differences({}, {}) == {}


def test_the_report_needs_nothing_from_outside():
    records = [record(i, i + 0.5, i + 0.7, i + 1.0, tokens=3) for i in range(20)]
    gauges = [{"t": float(t), "num_requests_running": 2.0, "num_requests_waiting": 0.0,
               "kv_cache_usage_perc": 0.1} for t in range(5)]  # fmt: skip
    summary = {**summarize(records), "client_cpu_cores": 0.1, "server": {"kv_waste": 0.02}}
    runs = [Run(Load(concurrency=c), records, summary, gauges) for c in (1, 4)]
    result = {
        "model": "<script>alert(1)</script>",
        "endpoint": "/v1/completions",
        "shape": {"input_len": 3},
        "ignore_eos": True,
        "seed": 0,
        "machine": describe_machine(),
    }
    page = render_html(result, runs)
    assert not re.search(r"<script|https?://|src=|@import|<link", page)
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) == 2 + 2 * 7
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "KV slots wasted 2.00%" in page
    assert "Gap between tokens (share of gaps)" in page
    short = render_html(result, [run._replace(gauges=gauges[:1]) for run in runs])
    assert "Requests in the server" not in short  # one sample makes no line


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=30))
def test_charts_stay_within_their_frame(points):
    chart = ElementTree.fromstring(line_chart("t", "x", [("a", sorted(points)), ("none", [])]))
    for line in chart.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 460
            assert 0 <= y <= 240


def test_no_line_runs_through_the_names_of_the_series():
    highest = [(0.0, 1.0), (1.0, 1.0)]
    series = [(name, highest) for name in ("a", "b", "c", "d")]
    chart = ElementTree.fromstring(line_chart("t", "x", series))
    lowest = max(float(text.attrib["y"]) for text in chart.iter("text") if text.text == "d")
    for line in chart.iter("polyline"):
        for pair in line.attrib["points"].split():
            assert float(pair.split(",")[1]) > lowest


def test_a_distribution_ends_at_one():
    assert cumulative([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    many = cumulative([float(i) for i in range(1234)])
    assert len(many) < 260
    assert many[-1] == (1233.0, 1.0)


def test_the_machine_is_named_without_telling_whose_it_is():
    told = str(describe_machine())
    assert "cores" in told
    assert "/" not in told.replace("x86/64", "")
    import os

    assert (tree_cpu_s(os.getpid()) or 0) > 0
    assert tree_cpu_s(2**22 + 1) is None
