"""Sleep, wake, other weights: the same texts afterwards, and memory that is really freed."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import Failure, ModelLoadError, SleepRefused
from engine.paths import default_model_dir
from engine.runner import load_runner
from engine.runner.host_copy import HostCopy
from engine.runner.sleeping import SleepingModel
from engine.types import Request, SamplingParams
from tests import tiny_encoders, tiny_models
from tests.engine import handmade

pytestmark = pytest.mark.usefixtures("only_new_objects_collected")

MIB = 2**20
PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, and one of another."""
    home = tmp_path_factory.mktemp("models")
    wide = {"intermediate_size": 96}
    return {
        "first": tiny_models.save("llama", home / "first", seed=1),
        "second": tiny_models.save("llama", home / "second", seed=2),
        "wider": tiny_models.save("llama", home / "wider", seed=2, **wide),
    }


def make(model: Path, num_blocks: int = 80, offload: int = 0, **changes: object) -> EngineCore:
    config = EngineConfig(
        model=str(model),
        num_threads=1,
        cache=CacheConfig(block_size=4, num_blocks=num_blocks, offload_bytes=offload),
        scheduler=SchedulerConfig(max_num_seqs=4),
        **changes,
    )
    return EngineCore(config, load_runner(config))


def text(
    core: EngineCore, prompt: tuple[int, ...] = PROMPT, id_: str = "a"
) -> tuple[tuple[int, ...], int]:
    """The text for a prompt, and how many of the prompt's tokens were cached."""
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    core.add(Request(id=id_, prompt_token_ids=prompt, sampling=sampling))
    tokens: list[int] = []
    num_cached = 0
    while core.has_work:
        output = core.step()
        tokens += [token for given in output.token_ids for token in given]
        num_cached += output.num_cached_tokens.get(id_, 0)
    return tuple(tokens), num_cached


def test_whatever_fails_while_weights_are_read_the_old_ones_serve_on(
    models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(resting: SleepingModel, model: str) -> None:
        raise MemoryError

    core = make(models["first"])
    before, _ = text(core)
    monkeypatch.setattr(SleepingModel, "with_weights", fail)
    with pytest.raises(MemoryError):
        core.reload(str(models["second"]))
    assert not core.is_asleep
    assert text(core) == (before, 0)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("options", [{}, {"attention_backend": "reference", "dtype": "float32"}])
def test_it_wakes_as_it_was_but_for_the_cache(models, level: int, options: dict) -> None:
    core = make(models["first"], **options)
    first, _ = text(core)
    again, num_cached = text(core)
    assert again == first
    assert num_cached == 36, "there was nothing to be forgotten"
    before = core.info
    core.sleep(level)
    assert core.is_asleep
    core.wake()
    assert text(core) == (first, 0)
    assert text(core) == (first, 36)
    assert core.check() == []
    assert core.info.memory == before.memory
    assert core.info.fingerprint == before.fingerprint


def test_what_went_to_the_host_is_forgotten_too(models) -> None:
    core = make(models["first"], num_blocks=16, offload=MIB)
    text(core)
    other = tuple(token + 50 for token in PROMPT)
    for prompt in (other, PROMPT, other):  # each fits only in place of the other
        _, num_cached = text(core, prompt=prompt)
    assert num_cached, "nothing came back from the host"
    core.reload(str(models["second"]))
    fresh = make(models["second"])
    for prompt in (PROMPT, other, PROMPT):
        assert text(core, prompt=prompt)[0] == text(fresh, prompt=prompt)[0]
    assert core.check() == []


def test_an_encoder_sleeps_too(tmp_path: Path) -> None:
    tiny_encoders.save("bert", tmp_path)
    config = EngineConfig(model=str(tmp_path), num_threads=1)
    core = EngineCore(config, load_runner(config))
    for level in (1, 2):
        core.sleep(level)
        core.wake()
    core.reload(str(tmp_path))
    assert core.info.generation == 1


def test_other_weights_are_those_of_an_engine_that_began_with_them(models) -> None:
    core = make(models["first"])
    first, _ = text(core)
    second, _ = text(make(models["second"]))
    assert first != second, "the weights are not told apart"
    old = core.info.fingerprint
    core.reload(str(models["second"]))
    assert text(core) == (second, 0)
    assert (core.info.generation, core.info.model) == (1, str(models["second"]))
    assert core.info.fingerprint != old
    core.sleep(2)
    core.wake()  # with the weights it had last
    assert text(core) == (second, 0)
    core.reload(str(models["first"]))
    assert (text(core), core.info.generation) == ((first, 0), 2)


def test_weights_that_cannot_be_used_change_nothing(models, tmp_path: Path) -> None:
    core = make(models["first"])
    first, _ = text(core)
    damaged = tmp_path / "damaged"
    shutil.copytree(models["second"], damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    for model, told in (
        (tmp_path / "nothing", "no such model directory"),
        (damaged, "model.safetensors"),
        (models["wider"], "its intermediate_size is 96, not"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            core.reload(str(model))
        assert not core.is_asleep
        assert text(core)[0] == first
        assert core.info.generation == 0


def test_nothing_is_taken_from_those_who_run(models) -> None:
    core = make(models["first"])
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    core.add(Request(id="a", prompt_token_ids=PROMPT, sampling=sampling))
    core.step()
    for disturb in (lambda: core.sleep(1), lambda: core.reload(str(models["second"]))):
        with pytest.raises(SleepRefused):
            disturb()
    with pytest.raises(SleepRefused, match="not asleep"):
        core.wake()
    core.fail_all(Failure(kind="EngineAsleep", message="enough"))
    output = core.step()
    assert (output.finish_reasons, output.errors["a"].message) == (("error",), "enough")
    core.sleep(1)
    with pytest.raises(SleepRefused, match="is asleep"):
        core.reload(str(models["second"]))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_given_back_to_the_system(tmp_path: Path) -> None:
    """In a separate process, since memory of other tests comes and goes in this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        weights, full, without_cache, without_weights = alone.submit(rest_twice, tmp_path).result()
    assert weights > 50 * MIB
    assert full - without_cache > 120 * MIB
    assert without_cache - without_weights > 0.8 * weights


def rest_twice(tmp_path: Path) -> tuple[int, int, int, int]:
    """Sizes: the weights, and resident bytes with a full cache, without it, without weights."""
    shape = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    config = json.loads((default_model_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **shape, **heads}))
    cache = CacheConfig(memory_bytes=128 * MIB)
    engine = EngineConfig(
        model=str(tmp_path), load_format="dummy", num_threads=1, max_model_len=4096, cache=cache
    )
    core = EngineCore(engine, load_runner(engine))
    for layer in core._runner._cache.layers:  # as long prompts would fill it, but at once
        layer.keys.fill_(1)
        layer.values.fill_(1)
    del layer
    weights, full = core.info.memory.weights_bytes, resident_bytes()
    core.sleep(1)
    without_cache = resident_bytes()
    core.wake()
    core.sleep(2)
    return weights, full, without_cache, resident_bytes()


def test_a_host_copy_finds_every_weight_and_brings_it_back(models) -> None:
    """As on a GPU, with tensors from torch's own allocator."""
    runner = handmade.load(models["first"], attention_backend="reference")
    modules = runner._model._modules
    layers = [layer.mlp.down for layer in modules.layers]
    for layer in layers:  # move them out of page-aligned memory, which cannot be resized
        layer.weight = layer.weight.clone()
    held = [layer.weight.clone() for layer in layers]
    copy = HostCopy.of(layers, torch.device("cpu"))
    assert copy.num_bytes == sum(weight.nbytes for weight in held)
    assert all(not layer.weight.untyped_storage().nbytes() for layer in layers)
    copy.restore()
    for layer, weight in zip(layers, held, strict=True):
        assert torch.equal(layer.weight, weight)


def test_a_host_copy_sees_all_that_a_model_is_made_of(models, monkeypatch) -> None:
    runner = handmade.load(models["first"], attention_backend="reference")
    found: list[torch.UntypedStorage] = []
    monkeypatch.setattr(HostCopy, "__init__", lambda self, storages: found.extend(storages))
    HostCopy.of(runner._make_sleeping(0), torch.device("cpu"))
    num_bytes = runner.info.memory.weights_bytes
    # Page-aligned memory comes in whole pages.
    assert num_bytes <= sum(storage.nbytes() for storage in found) < 4 * num_bytes
