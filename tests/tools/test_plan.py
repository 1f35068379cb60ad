"""The planner: the engine's own core over computed times, and the answers derived from it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.plan_rows import PlanRows, ScheduledRow
from loadtest.workloads import Shape
from server.cli import main
from tests.tools.planned import LLAMA_8B
from tools.plan.calibrate import Calibration
from tools.plan.cost import FitErrors, FittedCost, Roofline, StepShape, fit
from tools.plan.predict import Slo, find_max_rate, predict, replicas_for
from tools.plan.simulate import Replica, simulate
from tools.plan.traffic import Arrival, TraceError, at_rate, draw, rate_of, read_trace

STEP_S = 0.01


def replica(**fields) -> Replica:
    """A replica whose steps take 10 ms each, plus 0.1 ms per prompt token."""
    values = {
        "name": "even",
        "device": "cuda",
        "num_blocks": 512,
        "block_size": 16,
        "max_model_len": 2048,
        "cost": FittedCost((STEP_S, 0, 0, 0, 0, 0, 1e-4, 0)),
        "scheduler": SchedulerConfig(overlap=False, max_num_batched_tokens=512, max_num_seqs=8),
        **fields,
    }
    return Replica(**values)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    """600 prompt tokens in two steps, then nine more tokens."""
    told = simulate(replica(), [Arrival(3.0, 600, 10)])
    (outcome,) = told.outcomes
    assert outcome.ttft_s == pytest.approx(2 * STEP_S + 600 * 1e-4)
    assert outcome.tpot_s == pytest.approx(STEP_S)
    assert outcome.e2e_s == pytest.approx(outcome.ttft_s + 9 * STEP_S)
    assert told.duration_s == pytest.approx(3.0 + outcome.e2e_s)
    assert told.num_steps == 11


def test_who_finds_all_places_taken_waits_for_one() -> None:
    eight = [Arrival(0.0, 10, 50) for _ in range(8)]
    *first, last = simulate(replica(), [*eight, Arrival(0.0, 10, 50)]).outcomes
    assert last.ttft_s > max(outcome.e2e_s for outcome in first)


def test_a_small_cache_preempts_and_loses_nobody() -> None:
    crowd = [Arrival(0.0, 100, 150) for _ in range(8)]
    told = simulate(replica(num_blocks=40), crowd)
    assert len(told.outcomes) == 8
    assert sum(outcome.num_preemptions for outcome in told.outcomes) > 0
    assert simulate(replica(), crowd).duration_s < told.duration_s


def test_what_can_never_fit_is_refused_and_makes_no_tokens() -> None:
    asks = [Arrival(0.0, 100, 150), Arrival(0.1, 10**15, 1), Arrival(0.2, 10, 10**15)]
    told = simulate(replica(), asks)
    assert (told.num_rejected, told.num_output, len(told.outcomes)) == (2, 150, 1)
    assert simulate(replica(num_blocks=4), asks[:1]).num_rejected == 1


def test_a_shared_beginning_is_computed_once() -> None:
    def duration_s(num_shared: int, **fields) -> float:
        asks = [Arrival(float(index), 400, 2, num_shared) for index in range(20)]
        return sum(each.ttft_s for each in simulate(replica(**fields), asks).outcomes)

    alone, shared = duration_s(0), duration_s(384)
    assert alone - shared == pytest.approx(19 * 384 * 1e-4)
    assert duration_s(384, enable_prefix_caching=False) == pytest.approx(alone)


def test_steps_launched_ahead_still_follow_one_another() -> None:
    asks = [Arrival(0.0, 10, 40) for _ in range(4)]
    ahead = SchedulerConfig(overlap=True, max_num_batched_tokens=512)
    plain = simulate(replica(), asks)
    overlapped = simulate(replica(scheduler=ahead), asks)
    assert overlapped.duration_s >= plain.duration_s - 1e-9
    assert overlapped.duration_s <= plain.duration_s + 2 * STEP_S


# ---------------------------------------------------------------- costs


def test_a_shape_counts_what_rows_read() -> None:
    rows = PlanRows.of(
        [
            ScheduledRow("a", 9, (1,), (), True),
            ScheduledRow("b", 20, (1,), (), True, num_passes=3),
            ScheduledRow("c", 4, (1, 2, 3), (), True),
        ]
    )
    shape = StepShape.of(rows)
    assert shape == StepShape(
        num_passes=3,
        num_decodes=4,
        decode_context=10 + 21 + 22 + 23,
        num_prompts=1,
        num_prompt_tokens=3,
        prompt_pairs=5 + 6 + 7,
    )


def test_costs_are_found_again_though_some_steps_were_disturbed() -> None:
    rng = random.Random(0)
    true = FittedCost((1e-3, 0, 2e-4, 1e-7, 5e-4, 0, 3e-5, 1e-8))
    shapes = []
    for _ in range(600):
        prompt = rng.choice((0, 0, 64, 256))
        rows = rng.randint(1, 32)
        shapes.append(
            StepShape(1, rows, rows * rng.randint(10, 2000), bool(prompt), prompt, prompt * 300)
        )
    taken = [true.step_s(shape) * rng.uniform(0.99, 1.01) for shape in shapes]
    for place in range(0, 600, 10):
        taken[place] *= rng.uniform(2, 8)
    found, errors = fit(shapes, taken)
    assert min(found.seconds) >= 0
    assert errors.median_error < 0.02
    for rows, prompt in ((1, 0), (32, 0), (8, 256)):
        shape = StepShape(1, rows, rows * 500, bool(prompt), prompt, prompt * 300)
        assert found.step_s(shape) == pytest.approx(true.step_s(shape), rel=0.03)
    with pytest.raises(ValueError, match="too few"):
        fit(shapes[:3], taken[:3])


def test_a_roofline_is_the_slower_of_reading_and_multiplying() -> None:
    cost = Roofline(
        weights_bytes=16e9,
        kv_bytes_per_token=131072,
        num_parameters=8e9,
        bytes_per_s=3.2e12,
        flops_per_s=1e15,
        efficiency=1.0,
        overhead_s=0.0,
    )
    one = StepShape(1, 1, 1000, 0, 0, 0)
    assert cost.step_s(one) == pytest.approx((16e9 + 131_072_000) / 3.2e12)
    prompt = StepShape(1, 0, 0, 1, 8192, 8192 * 8193 // 2)
    assert cost.step_s(prompt) == pytest.approx(2 * 8e9 * 8192 / 1e15)


# ---------------------------------------------------------------- answers


def test_the_greatest_rate_keeps_the_limits_and_a_little_more_does_not() -> None:
    asks = draw(Shape("chat", 100, 40, max_total=2048), 1.0, 200, seed=1)
    slo = Slo(ttft_p99_ms=400.0)
    most = find_max_rate(replica(), asks, slo)
    assert most is not None
    assert most.ttft_ms is not None
    assert 200 < most.ttft_ms["p99"] <= 400
    beyond = predict(replica(), at_rate(asks, most.rate * 1.06))
    assert beyond.ttft_ms is not None
    assert beyond.ttft_ms["p99"] > 400
    count, each = replicas_for(replica(), asks, slo, 3.5 * most.rate, most)
    assert count == 4
    assert each.meets(slo)
    assert each.rate == pytest.approx(3.5 * most.rate / 4)
    count, each = replicas_for(replica(), asks, slo, 1e5 * most.rate, most)
    assert 100_000 <= count < 120_000
    assert each.meets(slo)
    assert find_max_rate(replica(), asks, Slo(tpot_p99_ms=5.0)) is None


def test_traffic_is_the_same_for_a_seed_and_as_fast_as_asked() -> None:
    shape = Shape("random", 100, 20)
    asks = draw(shape, 5.0, 2000, seed=3)
    assert asks == draw(shape, 5.0, 2000, seed=3)
    assert rate_of(asks) == pytest.approx(5.0, rel=0.1)
    assert rate_of(at_rate(asks, 11.0)) == pytest.approx(11.0)


def test_a_trace_that_cannot_be_used_is_told_by_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"at_s": 2, "prompt_tokens": 5, "output_tokens": 6}\n'
    trace.write_text(line + "\n" + line.replace("2", "1"))
    assert read_trace(trace) == [Arrival(1, 5, 6), Arrival(2, 5, 6)]
    for bad in ('{"at_s": 1}', "no", '{"at_s": 1, "prompt_tokens": 0, "output_tokens": 6}'):
        trace.write_text(line + bad)
        with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: "):
            read_trace(trace)
    trace.write_text("")
    with pytest.raises(TraceError, match="no request"):
        read_trace(trace)


# ---------------------------------------------------------------- the command


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_calibrate_then_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model, measured for a second: enough for a usable calibration."""
    file = tmp_path / "here.json"
    few = ["--seconds", "1", "--max-num-seqs", "2", "--num-threads", "1"]
    assert main(["plan", "--calibrate", "-o", str(file), *few]) == 0
    assert "steps measured" in capsys.readouterr().out
    asks = ["--rate", "2", "--num-requests", "20", "--input-len", "50", "--output-len", "8"]
    assert main(["plan", str(file), *asks, "--ttft-p99-ms", "60000"]) == 0
    told = last_line(capsys)
    assert told["one_replica"]["requests"] == 20
    assert 0 < told["one_replica"]["ttft_ms"]["p50"] < 1000
    assert told["replicas"] == 1
    assert told["most"]["rate"] > 2


@pytest.mark.slow
def test_too_few_requests_find_no_greatest_rate(tmp_path: Path, capsys) -> None:
    """All of them at once keep the limits, which says nothing about longer traffic."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    device = ["--bandwidth-gb-s", "3350", "--tflops", "990", "--memory-gib", "80"]
    asks = ["--rate", "1", "--ttft-p99-ms", "2000", "--output-len", "8", "--num-requests"]
    assert main(["plan", str(tmp_path), *device, *asks, "5"]) == 0
    told = capsys.readouterr().out
    assert "The most that one replica takes: unknown, as 5 requests are too few" in told
    assert json.loads(told.splitlines()[-1])["is_short"] is True
    assert main(["plan", str(tmp_path), *device, *asks, "600"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"The most that one replica takes: \d+ requests a second", told)
    assert "is_short" not in json.loads(told.splitlines()[-1])


def test_a_device_by_its_ceilings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dict(LLAMA_8B)
    (tmp_path / "config.json").write_text(json.dumps(config))
    device = ["--bandwidth-gb-s", "3350", "--tflops", "990", "--memory-gib", "80"]
    asks = ["--rate", "1", "--num-requests", "10", "--efficiency", "1", "--overhead-ms", "0"]
    assert main(["plan", str(tmp_path), *device, *asks]) == 0
    tpot_ms = last_line(capsys)["one_replica"]["tpot_ms"]["min"]
    assert tpot_ms == pytest.approx(16.06e9 / 3.35e12 * 1e3, rel=0.02)
    hybrid = {
        **{"model_type": "lfm2", "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False},
        **{"norm_eps": config.pop("rms_norm_eps"), "full_attn_idxs": [3, 7], "conv_L_cache": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **hybrid}))
    assert main(["plan", str(tmp_path), *device, *asks]) == 0
    tpot_ms = last_line(capsys)["one_replica"]["tpot_ms"]["min"]
    assert tpot_ms == pytest.approx(17.57e9 / 3.35e12 * 1e3, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert main(["plan", str(tmp_path), *device[:-1], "8", *asks]) == 1
    assert "the weights alone take 15.0 GiB" in capsys.readouterr().err
    for rate, told in (("20", "20"), ("1234.5", "1,234")):  # no 19.999999999999996, no 1.23e+03
        assert main(["plan", str(tmp_path), *device, "--rate", rate, "--num-requests", "10"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"One replica at {told} requests a second:"
        assert json.loads(lines[-1])["one_replica"]["rate"] == float(rate)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name a calibration's file"),
        (["{}/none.json"], "none.json: No such file"),
        (["{}/odd.json"], "odd.json: "),
        (["{}"], "needs --calibrate, or the device's --bandwidth-gb-s, --tflops and"),
        (["{}", "--tflops", "3"], "all positive"),
        (["{}/here.json", "--rate", "nan"], "--rate: must be more than 0, not nan"),
        (["{}/here.json", "--rate", "inf"], "--rate: must be more than 0, not inf"),
        (
            ["{}/here.json", "--rate", "1", "--num-requests", "0"],
            "--num-requests: must be at least",
        ),
        (
            ["{}/here.json", "--rate", "1", "--max-num-seqs", "0"],
            "--max-num-seqs: must be at least",
        ),
        (["{}/here.json", "--rate", "1", "--input-len", "0"], "--input-len: must be at least 1"),
        (["{}/here.json", "--rate", "1", "--range-ratio", "7"], "--range-ratio: must be at most 1"),
        (["{}/here.json", "--rate", "1", "--front-ms", "-1"], "--front-ms: must be at least 0"),
        (["{}/here.json", "--tpot-p99-ms", "9", "--num-requests", "1"], "must be two moments"),
        (["{}/less.json", "--rate", "1"], "less.json: 8 costs are wanted"),
        (["{}/none.json", "--efficiency", "0"], "--efficiency: must be more than 0"),
        (["--calibrate", "-o", "{}/no/where.json"], "where.json cannot be written"),
        (["--calibrate", "--seconds", "1e-9", "--max-num-seqs", "1"], "no step was measured"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "odd.json").write_bytes(msgspec.json.encode({"replica": {}}))
    found = Calibration(replica(), FitErrors(8, 0.0, 0.0), "float32", 1)
    (tmp_path / "here.json").write_bytes(msgspec.json.encode(found))
    less = msgspec.structs.replace(found, replica=replica(cost=FittedCost((1.0,))))
    (tmp_path / "less.json").write_bytes(msgspec.json.encode(less))
    monkeypatch.chdir(tmp_path)  # calibrations are written there
    given = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    assert main(["plan", *given]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
