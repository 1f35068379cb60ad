"""The plan of shares and communication, compared with real ranks."""

from __future__ import annotations

import json
import math

import pytest

from engine.models.checkpoint import read_config
from engine.parallel import group
from engine.parallel.shard import Shard, shard_spec
from server.cli import main
from tests import tiny_models
from tests.engine.handmade import Hand, load, request
from tools.plan.cost import Communication
from tools.plan.ranks import communication_of

NUM_ROWS = 3
GEMMA = {"num_key_value_heads": 2, "num_global_key_value_heads": 2}
KINDS = {
    "qwen2": {},
    "olmo2": {},  # norms over all heads exchange squares
    "deepseek_v3": {},
    "cohere": {},  # attention and MLP in parallel
    "granitemoehybrid": {},  # ranks share one group
    "nemotron_h": {},  # layers without an MLP
    "mamba2": {},  # and none with attention
    "mamba": {},  # channels make time steps together
    "longcat_flash": {},  # experts that are added after the next layer
    "gemma4_moe": GEMMA,  # experts beside an MLP
    "gemma4_shared": GEMMA,  # embeddings of each layer
}


class Heard:
    """What rank 0 sends to the ranks of its stage in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in ("all_reduce", "broadcast", "gather"):
            monkeypatch.setattr(group.Group, name, self._noting(name))

    def _noting(self, name):
        call = getattr(group.Group, name)

        def noted(ranks, x):
            if not ranks.rank:
                self.calls.append((name, x.numel() * x.element_size()))
            return call(ranks, x)

        return noted

    def total(self, name: str) -> tuple[int, int]:
        """The calls and their bytes."""
        sizes = [size for called, size in self.calls if called == name]
        return len(sizes), sum(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_say_what_is_planned(kind, tmp_path, monkeypatch):
    directory = tiny_models.save(kind, tmp_path, **KINDS[kind])
    runner = load(directory, tensor_parallel_size=2, dtype="bfloat16")
    spec = read_config(str(directory)).spec
    try:
        hand = Hand(runner)
        for row in range(NUM_ROWS):
            hand.add(request(f"{row}", [5, 6, 7 + row]))
        hand.step({f"{row}": 3 for row in range(NUM_ROWS)})
        heard = Heard(monkeypatch)
        hand.step({f"{row}": 1 for row in range(NUM_ROWS)})
    finally:
        runner._team.close()
    said = communication_of(shard_spec(spec, Shard(0, 2)), 2)
    assert heard.total("all_reduce") == (said.num_all_reduces, said.all_reduce_bytes * NUM_ROWS)
    # Token ids to embed, and the states that choose, before their logits come back.
    width = spec.hidden_size * 2
    assert heard.total("broadcast") == (
        said.num_broadcasts + 1,
        (said.broadcast_bytes + width) * NUM_ROWS,
    )
    calls, logits = heard.total("gather")  # each sends half of them, rank 0 to itself
    assert calls == 1
    assert said.sampling_bytes * NUM_ROWS == width * NUM_ROWS + logits


def test_stages_hand_on_what_is_planned(tmp_path, monkeypatch):
    """For a model with embeddings of each layer, which travel with the residual stream."""
    directory = tiny_models.save("gemma4_shared", tmp_path)
    spec = read_config(str(directory)).spec
    sent: list[int] = []
    send = group.Link.send
    runner = load(directory, pipeline_parallel_size=2, dtype="bfloat16")

    def noted(link, x):
        sent.append(x.numel() * x.element_size())
        send(link, x)

    try:
        hand = Hand(runner)
        hand.add(request("a", range(5, 12)))
        monkeypatch.setattr(group.Link, "send", noted)
        hand.step({"a": 7})
    finally:
        runner._team.close()
    first, last = (
        communication_of(shard_spec(spec, Shard(0, 1, False, stage, 2)), 1) for stage in (0, 1)
    )
    assert first == Communication(activation_bytes=first.activation_bytes)
    assert last == Communication(returned_bytes=last.returned_bytes)
    assert sent == [7 * first.activation_bytes, last.returned_bytes]


@pytest.mark.slow
def test_steps_of_ranks_are_measured_and_planned_with(tmp_path, capsys):
    file = tmp_path / "here.json"
    few = ["--seconds", "1", "--max-num-seqs", "2", "--num-threads", "1"]
    ranks = ["--tensor-parallel-size", "2"]
    assert main(["plan", "--calibrate", "-o", str(file), *few, *ranks]) == 0
    asks = ["--rate", "2", "--num-requests", "20", "--input-len", "50", "--output-len", "8"]
    capsys.readouterr()
    assert main(["plan", str(file), *asks, "--ttft-p99-ms", "60000"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "Replicas needed for 2 requests a second: 1 of 2 ranks, 2 devices" in told
    found = json.loads(told[-1])
    assert (found["tensor_parallel_size"], found["pipeline_parallel_size"]) == (2, 1)
    assert found["devices"] == 2
    assert math.isfinite(found["one_replica"]["ttft_ms"]["p50"])
    assert main(["plan", str(file), *asks, "--tensor-parallel-size", "2"]) == 1
    assert "a calibration is of the ranks" in capsys.readouterr().err
