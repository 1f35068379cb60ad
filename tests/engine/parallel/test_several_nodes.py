"""Ranks of one model on several nodes: the texts equal those of one process."""

from __future__ import annotations

import queue

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import EngineDead, ModelLoadError
from engine.parallel import follower
from engine.runner import load_runner
from engine.types import SamplingParams
from tests import tiny_models
from tests.engine.handmade import BLOCK_SIZE, request
from tests.engine.parallel.thread_nodes import of_node, serving, with_nodes

NUM_OUTPUT = 12
PROMPT = [5, 80, 3, 77, 120, 9, 14, 15, 92, 65, 35]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = tiny_models.build("qwen2", num_attention_heads=4, num_key_value_heads=2)
    directory = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(directory)
    return directory, tiny_models.greedy_tokens(model, PROMPT, NUM_OUTPUT)


def config_of(directory, size: int, stages: int = 1) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=64),
        scheduler=SchedulerConfig(max_num_batched_tokens=7),
    )


def text_of(core: EngineCore) -> list[int]:
    core.add(request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT)))
    return run(core)


def run(core: EngineCore) -> list[int]:
    tokens: list[int] = []
    while core.has_work:
        output = core.step()
        assert not output.errors
        tokens += [token for row in output.token_ids for token in row]
    return tokens


@pytest.mark.parametrize(
    ("nodes", "size", "stages"), [(2, 2, 1), (2, 4, 1), (4, 4, 1), (2, 1, 2), (2, 2, 2), (3, 1, 3)]
)
def test_texts_are_hugging_faces(checkpoint, tmp_path, nodes, size, stages):
    directory, expected = checkpoint
    config, ranks = with_nodes(config_of(directory, size, stages), tmp_path, nodes), size * stages
    with serving(*(of_node(config, rank) for rank in range(1, nodes))):
        runner = load_runner(config)
        core = EngineCore(config, runner)
        assert text_of(core) == expected
        names = [rank.name for rank in runner._team._ranks]
        here = ranks // nodes
        assert [name.split(" (")[1][:4] for name in names] == (
            ["proc"] * (here - 1) + ["node"] * (ranks - here)
        )
        runner._team.close()


def test_a_machine_whose_model_lies_elsewhere_reads_its_own(checkpoint, tmp_path):
    directory, expected = checkpoint
    config = with_nodes(config_of(directory, 2), tmp_path)
    elsewhere = tmp_path / "copy"
    elsewhere.symlink_to(directory)
    read = []
    read_config = follower.read_config

    def reading(model):
        read.append(model)
        return read_config(model)

    theirs = msgspec.structs.replace(of_node(config, 1), model=str(elsewhere))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "read_config", reading)
        with serving(theirs):
            runner = load_runner(config)
            assert text_of(EngineCore(config, runner)) == expected
            runner._team.close()
    assert read == [str(elsewhere)]


def test_a_lost_machine_is_the_end_of_the_engine(checkpoint, tmp_path):
    directory, _ = checkpoint
    config = with_nodes(config_of(directory, 2), tmp_path)
    with serving(of_node(config, 1)):
        runner = load_runner(config)
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        runner.on_loss(lost.put)
        core = EngineCore(config, runner)
        core.add(request("a", PROMPT, SamplingParams(max_tokens=60, ignore_eos=True)))
        core.step()
        (rank,) = runner._team._ranks
        rank.socket.shutdown(2)  # as if the other end were closed
        with pytest.raises(EngineDead, match="rank 1"):
            run(core)
        assert lost.get(timeout=30) == "rank 1 (node 1, 127.0.0.1) ended"
        runner._team.close()


def test_a_rank_that_cannot_load_there_tells_why_here(checkpoint, tmp_path, monkeypatch):
    directory, _ = checkpoint
    config = with_nodes(config_of(directory, 2), tmp_path)

    def refuse(*_):
        raise ModelLoadError("its GPU has no room")

    monkeypatch.setattr(follower, "read_weights", refuse)
    with (
        serving(of_node(config, 1)),
        pytest.raises(ModelLoadError, match="rank 1: its GPU has no room"),
    ):
        load_runner(config)


def test_who_does_not_come_in_time_is_named(checkpoint, tmp_path):
    directory, _ = checkpoint
    config = with_nodes(config_of(directory, 2), tmp_path, timeout_s=0.3)
    with pytest.raises(ModelLoadError, match=r"^nnodes 2: node 1 did not come to .* within 0.3 s"):
        load_runner(config)
