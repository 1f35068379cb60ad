"""Features of only some engines on a GPU: adapters, sleep, encoders, many experts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from engine.config import CacheConfig, EngineConfig, LoraConfig
from engine.core import EngineCore
from engine.pooling import PoolingParams
from engine.runner import load_runner
from engine.runner.graphs import DecodeGraph
from engine.runner.inputs import HostBatch
from engine.types import Adapter, Request
from tests import tiny_encoders, tiny_models
from tests.engine.pooling.drive import embed, load
from tests.engine.replays import count_prompt_replays
from tests.pretended_gpu.dry.test_dry_engine import PLAIN, requests_of, saved
from tests.pretended_gpu.engines import config_of, on_cpu, on_pretended_gpu, texts
from tests.pretended_gpu.stand_in import pretended_gpu

LAYERS = {"self_attn.q_proj": (96, 48), "mlp.down_proj": (48, 80)}  # (outputs, inputs)


def adapter(path: Path, rank: int, seed: int) -> Adapter:
    """A random adapter for the only layer of the tiny Qwen3."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in LAYERS.items():
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(id=path.name, name=path.name, path=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("eager", ["none", "main"])
def test_adapters_are_brought_and_added_without_waiting(eager: str, tmp_path: Path) -> None:
    config = config_of(saved("qwen3", tmp_path / "model"), lora=LoraConfig(max_loaded=2))
    first, second = adapter(tmp_path / "a", 4, seed=1), adapter(tmp_path / "b", 8, seed=2)
    rows: list[Request] = []
    for name, of_row in (("a", first), ("b", second), ("none", None)):
        prompt = tuple(range(30, 42 - len(rows)))
        rows.append(Request(id=name, prompt_token_ids=prompt, sampling=PLAIN[0], adapter=of_row))
    expected = on_cpu(config, rows)
    assert len({tuple(told) for told in expected.values()}) == 3
    with on_pretended_gpu(config, eager) as rig:
        assert texts(rig.core, [rows[0]]) == {"a": expected["a"]}
        later: list[object] = []
        # The second one is additional, and larger.
        assert not rig.launches.new(lambda: later.append(texts(rig.core, rows)))
        assert later == [expected]


@pytest.mark.parametrize("num_asked", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_with_adapters_are_captured_once_these_are_there(
    num_asked: int, tmp_path: Path
) -> None:
    """And again after they have moved, for a larger one; until then such steps are launched."""
    scheduler = {"max_num_seqs": min(num_asked, 2), "max_num_batched_tokens": 16}
    config = config_of(
        saved("qwen3", tmp_path / "model"), lora=LoraConfig(max_loaded=2), scheduler=scheduler
    )
    small, large = adapter(tmp_path / "a", 4, seed=1), adapter(tmp_path / "b", 20, seed=2)
    sampling = msgspec.structs.replace(PLAIN[0], max_tokens=4, ignore_eos=True)
    rows = [
        Request(id=name, prompt_token_ids=tuple(range(30, 36)), sampling=sampling, adapter=of_row)
        for name, of_row in (("small", small), ("large", large), ("none", None))
    ]
    expected = {row.id: on_cpu(config, [row])[row.id] for row in rows}
    assert len(set(map(tuple, expected.values()))) == 3
    turns = [rows[:1], rows[1:], rows[:2]][:num_asked]
    with on_pretended_gpu(config, "main") as rig:
        # They come when everything else has been captured.
        assert texts(rig.core, rows[2:]) == {"none": expected["none"]}
        while rig.core.prepare():
            pass
        graphs = rig.core._runner._graphs
        found, find = [], graphs.find

        def noted(batch: HostBatch, **more: bool) -> DecodeGraph | None:
            graph = find(batch, **more)
            if batch.is_decode and more["adapted"]:
                found.append(graph is not None)
            return graph

        graphs.find = noted
        prompts = count_prompt_replays(rig.core)
        for asked in turns:
            for is_captured in (False, True):
                found.clear()
                prompts.clear()
                assert texts(rig.core, asked) == {row.id: expected[row.id] for row in asked}
                assert found
                assert prompts
                # The large one moves the other.
                assert set(found + prompts) == {is_captured or asked == rows[:2]}
                while rig.core.prepare():
                    pass
                assert not graphs._ladder._stale


@pytest.mark.slow
def test_weights_sleep_on_the_host(tmp_path: Path) -> None:
    config, requests = config_of(saved("qwen3", tmp_path)), requests_of(PLAIN)
    expected = on_cpu(config, requests)
    with on_pretended_gpu(config) as rig:
        for level in (1, 2):
            assert texts(rig.core, requests) == expected
            rig.core.sleep(level)
            rig.core.wake()
        assert texts(rig.core, requests) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_encoders_give_the_vectors_of_a_cpu(kind: str, tmp_path: Path) -> None:
    tiny_encoders.save(kind, tmp_path)
    prompts, params = [list(range(3, 20)), [7], list(range(40, 9, -1))], PoolingParams()
    expected = embed(load(tmp_path), prompts, params)
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=4, num_blocks=256),
    )
    with pretended_gpu("main"):
        vectors = embed(EngineCore(config, load_runner(config)), prompts, params)
    for index, vector in expected.items():
        assert vectors[index] == pytest.approx(vector, abs=1e-5)


@pytest.mark.slow
def test_no_experts_are_compiled_for_while_requests_wait(tmp_path: Path) -> None:
    """Tile heights for any number of prompt tokens have been rehearsed."""
    model = str(tiny_models.save("mixtral", tmp_path, num_hidden_layers=2, num_local_experts=2))
    config = config_of(model, scheduler={"max_num_batched_tokens": 256})
    with on_pretended_gpu(config) as rig:
        texts(rig.core, requests_of(PLAIN, 9))
        for longest in (3, 20, 40, 60):
            requests = requests_of(PLAIN, longest)
            assert not rig.launches.new(lambda some=requests: texts(rig.core, some))
