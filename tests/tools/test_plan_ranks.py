"""Plans of models on several devices: shares, communication, and the number of devices needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.config import EngineConfig, SchedulerConfig
from server.cli import main
from tests.tools.planned import LLAMA_8B
from tools.plan.cost import Communication, Link, ParallelCost, Roofline, Stage, StepShape
from tools.plan.link import fit_link
from tools.plan.ranks import Device, read_spec, replica_of
from tools.plan.simulate import Replica, simulate
from tools.plan.traffic import Arrival

STEP_S = 0.01
FREE = Link(bytes_per_s=1e30, latency_s=0.0)
# Without other costs of a step, so that times follow from bytes alone.
H100 = ["--bandwidth-gb-s", "3350", "--tflops", "990", "--efficiency", "1", "--overhead-ms", "0"]
FREE_LINK = ["--link-gb-s", "1e20", "--link-latency-us", "0", "--layer-launch-us", "0"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def even(seconds: float) -> Roofline:
    """A cost in which each pass takes ``seconds``."""
    return Roofline(seconds, 0, 0, 1, 1, efficiency=1, overhead_s=0)


def replica(cost, num_stages: int, **fields) -> Replica:
    values = {
        "name": "even",
        "device": "cuda",
        "num_blocks": 4096,
        "block_size": 16,
        "max_model_len": 2048,
        "cost": cost,
        "scheduler": SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
        "pipeline_parallel_size": num_stages,
        **fields,
    }
    return Replica(**values)


# ---------------------------------------------------------------- costs


def test_ranks_take_what_they_compute_and_what_they_say() -> None:
    """Four all-reduces per pass over four ranks, for which a ring sends 3/2 of the bytes."""
    link = Link(bytes_per_s=1e6, latency_s=1e-3)
    said = Communication(
        num_all_reduces=4,
        all_reduce_bytes=4000,
        num_broadcasts=1,
        broadcast_bytes=8,
        sampling_bytes=500,
    )
    stage = Stage(even(STEP_S), 4, said)
    shape = StepShape(2, 6, 0, 0, 0, 0)
    expected = 2 * STEP_S + 8 * 1e-3 + 1.5 * 6 * 4000 / 1e6  # all-reduces
    expected += 2 * 3 * 1e-3 + 6 * (8 + 500) / 1e6  # ids, states and logits
    assert stage.step_s(shape, link) == pytest.approx(expected)
    alone = Stage(even(STEP_S), 1, Communication(activation_bytes=100, returned_bytes=10))
    assert alone.step_s(shape, link) == pytest.approx(2 * STEP_S + 2e-3 + 6 * 110 / 1e6)


def test_a_host_that_launches_layers_one_by_one_may_be_what_a_step_waits_for() -> None:
    cost = Roofline(8e9, 0, 4e9, 1e12, 1e15, efficiency=1, overhead_s=0, launch_s=0.02)
    assert cost.step_s(StepShape(1, 1, 0, 0, 0, 0)) == pytest.approx(0.02)
    prompts = StepShape(1, 0, 0, 1, 8192, 0)
    assert cost.step_s(prompts) == pytest.approx(2 * 4e9 * 8192 / 1e15)


def test_stages_work_on_several_steps_at_once() -> None:
    """A token passes through both; many sequences get tokens at twice the rate of one step."""
    cost = ParallelCost(
        (Stage(even(STEP_S), 1, Communication()), Stage(even(STEP_S), 1, Communication())), FREE
    )
    (alone,) = simulate(replica(cost, 2), [Arrival(0.0, 100, 20)]).outcomes
    assert alone.tpot_s == pytest.approx(2 * STEP_S)
    crowd = [Arrival(0.0, 8, 50) for _ in range(16)]
    in_turn = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64, overlap=False)
    overlapped = simulate(replica(cost, 2), crowd).duration_s
    assert overlapped < 1.1 * 50 * 2 * STEP_S
    one_after_another = simulate(replica(cost, 2, scheduler=in_turn), crowd).duration_s
    assert one_after_another == pytest.approx(50 * 2 * STEP_S, rel=0.1)


def test_a_link_is_found_again_from_its_all_reduces() -> None:
    true = Link(bytes_per_s=2.5e9, latency_s=4e-5)
    sizes = [2**power for power in range(10, 25)]
    found = fit_link({size: true.all_reduce_s(size, 4) for size in sizes}, 4, "cpu")
    assert found.link.bytes_per_s == pytest.approx(2.5e9, rel=1e-3)
    assert found.link.latency_s == pytest.approx(4e-5, rel=1e-3)
    assert found.median_error < 1e-3


# ---------------------------------------------------------------- the command


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    capsys.readouterr()
    assert main(["plan", *arguments]) == status
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def tpot_ms(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    asks = ["--memory-gib", "80", "--rate", "1", "--num-requests", "10", "--input-len", "16"]
    told = planned(capsys, *arguments, *H100, *asks)
    return told["one_replica"]["tpot_ms"]["min"]


def test_ranks_share_the_bytes_and_stages_do_not_hurry_a_token(model, capsys) -> None:
    alone = tpot_ms(capsys, model)
    four = tpot_ms(capsys, model, "--tensor-parallel-size", "4", *FREE_LINK)
    assert four == pytest.approx(alone / 4, rel=0.01)
    stages = tpot_ms(capsys, model, "--pipeline-parallel-size", "4", *FREE_LINK)
    assert stages == pytest.approx(alone, rel=0.01)
    slow = ["--link-gb-s", "1e20", "--link-latency-us", "100", "--layer-launch-us", "0"]
    calls = 2 * 32 + 1 + 3  # two sums per layer, the embeddings' and its ids; states and logits
    linked = tpot_ms(capsys, model, "--tensor-parallel-size", "4", *slow)
    assert linked - four == pytest.approx(calls * 0.1)
    slow_host = [*FREE_LINK[:-1], "500"]
    captured = tpot_ms(capsys, model, "--tensor-parallel-size", "4", *slow_host)
    assert captured == pytest.approx(four)
    launched = tpot_ms(capsys, model, "--pipeline-parallel-size", "4", *slow_host)
    assert launched == pytest.approx(32 * 0.5, rel=0.01)


def test_steps_are_those_of_the_given_devices_not_of_this_machine(model) -> None:
    ceilings = {"bytes_per_s": 3e12, "flops_per_s": 1e15, "efficiency": 1.0, "overhead_s": 0.0}
    for gib, most_tokens in ((40, 2048), (80, 8192)):
        device = Device(memory_bytes=gib * 2**30, layer_launch_s=0.0, link=FREE, **ceilings)
        replica = replica_of(EngineConfig(model=model), read_spec(model), device)
        assert replica.scheduler.step_tokens == most_tokens


@pytest.mark.slow
def test_what_one_device_cannot_hold_is_given_the_fewest_that_can(model, capsys) -> None:
    """15 GiB of weights on devices of 10: two hold them, four are faster but not needed."""
    asks = ["--memory-gib", "10", "--rate", "2", "--num-requests", "20", "--output-len", "32"]
    given = [model, *H100, *asks, "--max-ranks", "4"]
    assert main(["plan", *given, "--tpot-p99-ms", "100"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^ +2 +1 +unknown +1 +2$", table, re.MULTILINE)  # for so few requests
    told = planned(capsys, *given, "--tpot-p99-ms", "100")
    problems = [each["problem"] for each in told["tried"]]
    sizes = [
        (each["tensor_parallel_size"], each["pipeline_parallel_size"]) for each in told["tried"]
    ]
    assert sizes == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert problems == ["--memory-gib: the weights alone take 15.0 GiB", *[None] * 5]
    assert (told["tensor_parallel_size"], told["pipeline_parallel_size"]) == (2, 1)
    assert (told["replicas"], told["devices"]) == (1, 2)
    # Two devices read the weights in 2.4 ms, four in half of that.
    fast = planned(capsys, *given, *FREE_LINK, "--tpot-p99-ms", "1.6")
    assert fast["tensor_parallel_size"] == 4
    assert fast["tried"][1]["problem"] == "a request that is alone takes longer than the limits"
    none = planned(capsys, *given, *FREE_LINK, "--tpot-p99-ms", "0.5", status=1)
    assert len(none["tried"]) == 6


def test_ranks_that_cannot_share_the_model_say_why(model, capsys) -> None:
    given = [model, *H100, "--memory-gib", "80", "--rate", "1", "--num-requests", "5"]
    assert main(["plan", *given, "--tensor-parallel-size", "3"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("quire plan: tensor_parallel_size 3: num_key_value_heads (8) neither")
    assert main(["plan", *given, "--memory-gib", "3", "--tensor-parallel-size", "4"]) == 1
    assert "a rank's weights alone take 3.7 GiB" in capsys.readouterr().err
    assert main(["plan", *given, "--enable-expert-parallel"]) == 1
    assert "needs a tensor_parallel_size above 1" in capsys.readouterr().err


def test_whole_experts_are_counted_where_most_of_them_lie(tmp_path, capsys) -> None:
    """Three experts on two ranks: one has two of them and determines the time."""
    mixture = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
    config = {
        **LLAMA_8B,
        **mixture,
        "num_hidden_layers": 2,
        "architectures": ["MixtralForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    two = [str(tmp_path), "--tensor-parallel-size", "2", *FREE_LINK]
    parts, whole = tpot_ms(capsys, *two), tpot_ms(capsys, *two, "--enable-expert-parallel")
    expert = 3 * 4096 * 14336 * 2 / 3.35e12 * 1e3
    assert whole - parts == pytest.approx(2 * expert / 2, rel=0.01)


@pytest.mark.slow
def test_all_reduces_of_this_machine_are_measured(capsys) -> None:
    told = planned(capsys, "--measure-link", "2", "--device", "cpu")
    assert told["num_ranks"] == 2
    assert len(told["seconds"]) >= 3
    link = Link(**told["link"])
    # A tenth of a second per megabyte is more than even a busy machine takes.
    assert 0 < link.all_reduce_s(2**20, 2) < 0.1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--max-ranks", "2"], "--max-ranks: there must be a limit to choose by"),
        (
            ["--max-ranks", "2", "--tensor-parallel-size", "2", "--ttft-p99-ms", "9"],
            "--max-ranks: it tries sizes; leave those out that are fixed",
        ),
        (["--measure-link", "2"], "--measure-link: a link has no model"),
        (["--measure-link", "1"], "--measure-link: must be at least 2"),
        (["--calibrate", "--pipeline-parallel-size", "2"], "stages are planned by ceilings"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: must be at least 1"),
        (["--link-gb-s", "0"], "--link-gb-s: must be more than 0"),
        (["--layer-launch-us", "-1"], "--layer-launch-us: must be at least 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, problem, model, capsys) -> None:
    given = [model, *H100, "--memory-gib", "80", "--rate", "1"]
    assert main(["plan", *given, *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_a_model_of_states_alone_is_bound_by_its_states(tmp_path, capsys) -> None:
    """Mamba-2 130M: no keys and values, and 24 layers' states of each sequence."""
    model = {
        **{"model_type": "mamba2", "num_heads": 24, "head_dim": 64, "vocab_size": 50288},
        **{"hidden_size": 768, "state_size": 128, "num_hidden_layers": 24, "n_groups": 1},
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    traffic = ["--rate", "9999", "--num-requests", "40", "--input-len", "16", "--output-len", "32"]
    roomy = planned(capsys, str(tmp_path), *H100, "--memory-gib", "8", *traffic)["one_replica"]
    tight = planned(capsys, str(tmp_path), *H100, "--memory-gib", "0.42", *traffic)["one_replica"]
    assert roomy["refused"] == tight["refused"] == 0
    assert tight["ttft_ms"]["p99"] > 2 * roomy["ttft_ms"]["p99"]  # they wait for each other's
