"""Decode steps with adapters as captured programs: the same bits as steps from Python."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import InvalidParameter
from engine.runner import load_runner
from engine.types import Adapter, Request, SamplingParams
from kernels.cpu import linear
from tests import tiny_models

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")
# Multiples of the panel size; the projections of the latent model are listed below.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
LATENT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"moe_intermediate_size": 32, "num_key_value_heads": 4},
}
KV_HEADS = 2
RANKS = (("small", 3), ("large", 8))
LLAMA_LAYERS = {  # (outputs, inputs)
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (KV_HEADS * 16, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def make_adapter(path: Path, layers: dict[str, tuple[int, int]], rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in layers.items():
        name = f"base_model.model.model.layers.0.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 4
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(id=path.name, name=path.name, path=str(path))


def make(directory: Path, *, eager: bool, max_loaded: int = 8) -> EngineCore:
    return EngineCore.load(
        EngineConfig(
            model=str(directory),
            dtype="bfloat16",
            device="cpu",
            attention_backend="cpu",
            enforce_eager=eager,
            num_threads=2,
            cache=CacheConfig(block_size=4, num_blocks=60),
            scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=24),
            lora=LoraConfig(max_loaded=max_loaded, max_on_host=8),
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_batch_invariant(dtype: str, tmp_path: Path) -> None:
    """Log-probabilities are bit-identical alone and in a batch, with an adapter and without.

    The prompts are long enough that a library would have multiplied them.
    """
    directory = tiny_models.save("llama", tmp_path / "base", **SHAPE)
    adapters = [make_adapter(tmp_path / name, LLAMA_LAYERS, rank, rank) for name, rank in RANKS]
    rng, told = random.Random(4), SamplingParams(temperature=0.0, max_tokens=5, logprobs=3)
    requests = [
        Request(
            id=f"{adapter and adapter.name}-{length}",
            prompt_token_ids=tuple(rng.randrange(3, 160) for _ in range(length)),
            sampling=told,
            adapter=adapter,
        )
        for adapter in (None, *adapters)
        for length in (1, 7, 90)
    ]

    def heard(asked: list[Request], **limits: int) -> dict[str, list]:
        config = EngineConfig(
            model=str(directory),
            dtype=dtype,
            batch_invariant=True,
            num_threads=2,
            cache=CacheConfig(block_size=4, num_blocks=300),
            scheduler=SchedulerConfig(**limits),
        )
        core, told = EngineCore.load(config), {}
        for request in asked:
            core.add(request)
        while core.has_work:
            output = core.step()
            assert not output.errors
            for id_ in output.ids:
                told.setdefault(id_, []).extend(output.logprobs[id_])
        return told

    crowd = heard(requests, max_num_batched_tokens=200)
    assert len(crowd) == len(requests)
    for request in requests:
        assert heard([request])[request.id] == crowd[request.id]
    texts = {tuple(map(str, crowd[f"{name}-90"])) for name in ("None", "small", "large")}
    assert len(texts) == 3  # the adapters change the text within this length


def live(
    core: EngineCore, adapters: list[Adapter | None], seed: int
) -> tuple[dict[str, list[int]], list[bool]]:
    """The tokens of random requests, and for each replayed step whether it had adapters."""
    rng = random.Random(seed)
    told: dict[str, list[int]] = {}
    replayed: list[bool] = []
    programs = core._runner._graphs
    if programs is not None:
        load = programs.load

        def note(graph, *arguments) -> None:
            replayed.append(graph.adapters is not None)
            load(graph, *arguments)

        programs.load = note
    while core.has_work or len(told) < 24:
        if len(told) < 24 and rng.random() < 0.4:
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.randrange(1000),
                max_tokens=rng.randrange(1, 20),
                ignore_eos=True,
            )
            # Later requests bring adapters that none of the captured steps had.
            adapter = rng.choice(adapters[: 2 + len(told) // 6])
            prompt = tuple(rng.randrange(3, 160) for _ in range(rng.randrange(1, 20)))
            request_id = str(len(told))
            told[request_id] = []
            core.add(
                Request(id=request_id, prompt_token_ids=prompt, sampling=sampling, adapter=adapter)
            )
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told[row_id].extend(tokens)
    return told, replayed


@pytest.mark.parametrize(
    ("kind", "max_loaded"),
    [("llama", 8), ("llama", 1), ("gemma3", 8)],
    ids=["all at once", "one slot", "gemma3"],
)
def test_the_same_bits_as_steps_from_python(tmp_path: Path, kind: str, max_loaded: int) -> None:
    """Also when adapters of more ranks arrive, which relocate what captured steps read."""
    shape = {**SHAPE, "num_key_value_heads": KV_HEADS}
    directory = tiny_models.save(kind, tmp_path / "base", **shape)
    adapters = [None] + [
        make_adapter(tmp_path / str(rank), LLAMA_LAYERS, rank, rank) for rank in (2, 5, 3, 8)
    ]
    for seed in (1, 2):
        told, replayed = live(make(directory, eager=False, max_loaded=max_loaded), adapters, seed)
        expected, _ = live(make(directory, eager=True), adapters, seed)
        assert told == expected
        assert replayed.count(True) > 10
        without, _ = live(make(directory, eager=True), [None] * len(adapters), seed)
        assert told != without


def test_where_an_adapter_is_absorbed_only_its_steps_run_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Latent attention applies the adapter of ``kv_b_proj`` in several products."""
    directory = tiny_models.save("deepseek_v2_lite", tmp_path / "base", **LATENT)
    layers = {"self_attn.kv_b_proj": (4 * (32 + 32), 32)}
    adapters = [None, make_adapter(tmp_path / "a", layers, 2, 0)]
    with caplog.at_level(logging.INFO):
        told, replayed = live(make(directory, eager=False), adapters, 3)
    assert caplog.text.count("decode steps with adapters are not recorded") == 1
    assert "decode steps are not recorded" not in caplog.text
    assert replayed
    assert not any(replayed)
    expected, _ = live(make(directory, eager=True), adapters, 3)
    assert told == expected


def test_what_is_not_batch_invariant_takes_no_adapter(tmp_path: Path) -> None:
    directory = tiny_models.save("deepseek_v2_lite", tmp_path / "base", **LATENT)
    adapter = make_adapter(tmp_path / "a", {"self_attn.kv_b_proj": (4 * (32 + 32), 32)}, 2, 0)
    runner = load_runner(
        EngineConfig(
            model=str(directory),
            dtype="bfloat16",
            batch_invariant=True,
            num_threads=2,
            cache=CacheConfig(block_size=4, num_blocks=60),
        )
    )
    with pytest.raises(InvalidParameter, match="not batch-invariant"):
        runner.load_adapter(adapter)
