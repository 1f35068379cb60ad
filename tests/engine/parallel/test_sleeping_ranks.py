"""Sleep, wake and other weights for a model on several ranks."""

from __future__ import annotations

import json
import os
import queue
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from engine.config import CacheConfig, EngineConfig, NodesConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import EngineDead, ModelLoadError, SleepRefused
from engine.parallel import follower_worker
from engine.paths import default_model_dir
from engine.runner import load_runner
from engine.types import Adapter, Request, SamplingParams
from tests import tiny_models
from tests.engine.lora.test_lora import ADAPTERS, make_served

pytestmark = pytest.mark.usefixtures("only_new_objects_collected")

MIB = 2**20
PROMPT = tuple(range(3, 40))
RANKS = pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, one of another, and a truncated one."""
    home = tmp_path_factory.mktemp("models")
    found = {
        "first": tiny_models.save("llama", home / "first", seed=1),
        "second": tiny_models.save("llama", home / "second", seed=2),
        "wider": tiny_models.save("llama", home / "wider", seed=2, intermediate_size=96),
    }
    shutil.copytree(found["second"], home / "damaged")
    with (home / "damaged" / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    return found | {"damaged": home / "damaged"}


@pytest.fixture
def make():
    """Creates engines, and ends their ranks."""
    cores: list[EngineCore] = []

    def made(model: Path, size: int = 2, stages: int = 1, **changes) -> EngineCore:
        cache = CacheConfig(
            block_size=4,
            num_blocks=changes.pop("num_blocks", 80),
            offload_bytes=changes.pop("offload", 0),
        )
        config = EngineConfig(
            model=str(model),
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            cache=cache,
            scheduler=SchedulerConfig(max_num_seqs=4),
            **changes,
        )
        cores.append(EngineCore(config, load_runner(config)))
        teams.append(cores[-1]._runner._team)
        return cores[-1]

    teams = []
    yield made
    for team in teams:
        if team is not None:
            team.close()


def text(core: EngineCore, prompt=PROMPT, adapter: Adapter | None = None) -> tuple[list[int], int]:
    """The text for a prompt, and how many of the prompt's tokens were cached."""
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    core.add(Request(id="a", prompt_token_ids=prompt, sampling=sampling, adapter=adapter))
    tokens: list[int] = []
    num_cached = 0
    while core.has_work:
        output = core.step()
        assert not output.errors
        tokens += [token for given in output.token_ids for token in given]
        num_cached += output.num_cached_tokens.get("a", 0)
    return tokens, num_cached


def other_rank(core: EngineCore, number: int = 1):
    """A rank that is a thread here, whether the engine sleeps or not."""
    team = core._runner._team if core._sleeping_runner is None else core._sleeping_runner._team
    return team._ranks[number - 1]._child


@pytest.mark.parametrize(
    ("size", "stages", "level"),
    [
        *((2, 1, 1), (1, 2, 2)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 1, 2), (1, 2, 1), (2, 2, 2))
        ),
    ],
)
def test_ranks_wake_as_they_were_but_for_the_cache(models, make, size, stages, level) -> None:
    core = make(models["first"], size, stages)
    first, _ = text(core)
    assert text(core) == (first, 36)
    before = core.info
    for _ in range(2):
        core.sleep(level)
        core.wake()
        assert text(core) == (first, 0)
    assert text(core) == (first, 36)
    assert core.check() == []
    assert (core.info.memory, core.info.fingerprint) == (before.memory, before.fingerprint)


@RANKS
def test_other_weights_are_those_of_an_engine_that_began_with_them(
    models, make, size, stages
) -> None:
    core = make(models["first"], size, stages)
    first, _ = text(core)
    second, _ = text(make(models["second"], 1))
    assert first != second, "the weights are not told apart"
    core.reload(str(models["second"]))
    assert text(core) == (second, 0)
    assert (core.info.generation, core.info.model) == (1, str(models["second"]))
    core.sleep(2)
    core.wake()  # with the weights it had last
    assert text(core) == (second, 0)
    core.reload(str(models["first"]))
    assert (text(core), core.info.generation) == ((first, 0), 2)


@RANKS
def test_weights_that_cannot_be_used_change_nothing(models, make, size, stages) -> None:
    core = make(models["first"], size, stages)
    first, _ = text(core)
    for model, told in (
        ("damaged", "model.safetensors"),
        ("wider", "its intermediate_size is 96, not"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            core.reload(str(models[model]))
        assert not core.is_asleep
        assert text(core)[0] == first
        assert core.info.generation == 0


def test_weights_that_one_rank_cannot_read_are_taken_by_none(models, make, monkeypatch) -> None:
    def read_weights(plan, on_progress):
        if plan.shard.number == 2:
            raise MemoryError
        return read(plan, on_progress)

    read = follower_worker.read_weights
    core = make(models["first"], 1, 3)
    first, _ = text(core)
    monkeypatch.setattr(follower_worker, "read_weights", read_weights)
    with pytest.raises(ModelLoadError, match="rank 2: MemoryError"):
        core.reload(str(models["second"]))
    assert text(core)[0] == first
    core.sleep(2)
    with pytest.raises(ModelLoadError, match="rank 2: MemoryError"):
        core.wake()
    assert core.is_asleep
    monkeypatch.undo()
    core.wake()
    assert text(core)[0] == first


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_where_one_rank_has_no_room_all_sleep_on(models, make, monkeypatch, level) -> None:
    def make_room(plan, serve):
        if plan.shard.number == 2:
            raise ModelLoadError("a KV cache of 1 MiB does not fit")
        return made(plan, serve)

    made = follower_worker.allocate_caches
    core = make(models["first"], 1, 3)
    first, _ = text(core)
    core.sleep(level)
    with monkeypatch.context() as patched:
        patched.setattr(follower_worker, "allocate_caches", make_room)
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="rank 2: a KV cache"):
                core.wake()
            assert core.is_asleep
    core.wake()
    assert text(core) == (first, 0)


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_dies_asleep_is_noticed(models, make, level) -> None:
    core = make(models["first"])
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    core._runner.on_loss(told.put)
    core.sleep(level)
    other_rank(core).hang_up()
    assert "rank 1 (process" in told.get(timeout=30)
    with pytest.raises(EngineDead, match="rank 1"):
        core.wake()


@pytest.mark.parametrize(
    ("kind", "offload", "size", "stages"),
    [
        *(("qwen3_next", 0, 2, 1), ("llama", MIB, 1, 2)),
        pytest.param("qwen3_next", 0, 1, 2, marks=pytest.mark.slow),
        pytest.param("llama", MIB, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_states_and_blocks_on_the_host_are_forgotten(
    make, tmp_path, kind, offload, size, stages
) -> None:
    layers = {"num_hidden_layers": 4}
    if kind == "qwen3_next":
        layers["layer_types"] = ["linear_attention", "full_attention"] * 2
    model = tiny_models.save(kind, tmp_path, **layers)
    core = make(model, size, stages, num_blocks=24, offload=offload)
    first, _ = text(core)
    for level in (1, 2):
        core.sleep(level)
        core.wake()
        assert text(core) == (first, 0)
    assert core.check() == []


def test_adapters_are_read_again(make, tmp_path) -> None:
    directory, adapters, *_ = make_served("llama", tmp_path, {"all": ADAPTERS["all"]})
    core = make(directory)
    adapter = adapters["all"]
    plain, adapted = text(core)[0], text(core, adapter=adapter)[0]
    assert plain != adapted
    for level in (1, 2):
        core.sleep(level)
        core.wake()
        assert text(core, adapter=adapter)[0] == adapted
        assert text(core)[0] == plain


def test_ranks_on_several_machines_do_not_sleep(models, make) -> None:
    nodes = NodesConfig(size=2, rank=0, master_addr="here", master_port=1, secret_file="secret")
    config = EngineConfig(model=str(models["first"]), tensor_parallel_size=2, nodes=nodes)
    core = EngineCore(config, make(models["first"])._runner)
    for ask in (lambda: core.sleep(1), lambda: core.reload(str(models["second"]))):
        with pytest.raises(SleepRefused, match="several machines"):
            ask()


# ---------------------------------------------------------------- processes


@pytest.mark.slow
def test_every_rank_gives_its_memory_back(tmp_path: Path) -> None:
    """With ranks that are processes, started from a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        weights, *told = alone.submit(rest_in_turn, tmp_path).result()
    assert weights > 25 * MIB
    for awake, without_cache, without_weights, again in zip(*told, strict=True):
        assert awake - without_cache > 25 * MIB
        assert without_cache - without_weights > 0.8 * weights
        assert again - without_weights > 0.8 * weights


def rest_in_turn(tmp_path: Path) -> tuple:
    """The size of a rank's weights, and resident bytes by rank.

    Measured awake, asleep at level 1, at level 2, and awake again.
    """
    shape = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    config = json.loads((default_model_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **shape, **heads}))
    engine = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        num_threads=1,
        max_model_len=4096,
        cache=CacheConfig(memory_bytes=64 * MIB),
        tensor_parallel_size=2,
    )
    core = EngineCore(engine, load_runner(engine))
    team = core._runner._team
    us = psutil.Process(os.getpid())
    ranks = [us, *(each for each in us.children() if "engine.parallel.follower" in each.cmdline())]

    def resident() -> list[int]:
        return [rank.memory_info().rss for rank in ranks]

    text(core, prompt=tuple(index % 1000 + 3 for index in range(3000)))  # fills most of the cache
    weights, awake = core.info.memory.weights_bytes, resident()
    core.sleep(1)
    without_cache = resident()
    core.wake()
    core.sleep(2)
    without_weights = resident()
    core.wake()
    text(core)
    again = resident()
    team.close()
    return weights, awake, without_cache, without_weights, again
