"""Gemma 4 on several ranks.

It has two kinds of heads, experts beside MLPs, embeddings of each layer, and layers that read the
keys and values of another.
"""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.parallel.shard import Shard, parameter_slices, shard_spec
from engine.runner import load_runner
from engine.runner.load_plan import attention_spec
from engine.types import SamplingParams
from kernels.attention import Heads
from tests import tiny_gemmas, tiny_models
from tests.engine.handmade import load, request
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run
from tests.engine.parallel.test_shared_logits import logits_of, prompt, shared_logits
from tests.engine.parallel.test_shared_texts import engine, texts_of

TWO_HEADS = {"num_key_value_heads": 2}  # one each for two ranks; other layers have one for both
NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def said_by(kind, directory, **changes) -> torch.Tensor:
    """Hugging Face's logits for the prompt; also saves the model in the directory."""
    model = tiny_models.build(kind, **{**TWO_HEADS, **changes})
    model.save_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", tiny_gemmas.GEMMAS)
def test_two_ranks_say_what_hugging_face_says(tmp_path, kind):
    expected = said_by(kind, tmp_path)
    torch.testing.assert_close(shared_logits(tmp_path, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_shared"])
@pytest.mark.parametrize("head_dim", [8, 16])
def test_more_ranks_than_heads_of_any_kind(tmp_path, kind, head_dim):
    """Then a rank has one head of each kind; if both have the same size, the kinds are merged."""
    shape = {"num_attention_heads": 8, "global_head_dim": head_dim}
    expected = said_by(kind, tmp_path, **shape)
    torch.testing.assert_close(shared_logits(tmp_path, 4), expected, atol=1e-4, rtol=0)


def test_what_a_rank_asks_of_attention(tmp_path):
    """Equal heads form one kind, with the windows of both; each stage has its own kinds."""
    shape = {**TWO_HEADS, "num_attention_heads": 8, "global_head_dim": 8}
    spec = read_config(str(tiny_models.save("gemma4", tmp_path, **shape))).spec

    def windows(shard: Shard) -> dict[Heads, set[int | None]]:
        share = shard_spec(spec, shard)
        asked = attention_spec(share, 4, torch.float32, torch.device("cpu")).by_heads()
        return {heads: set(each.windows) for heads, each in asked.items()}

    assert windows(Shard(0, 1)) == {(8, 2, 8): {12}, (8, 1, 8): {None}}
    assert windows(Shard(1, 2)) == {(4, 1, 8): {12, None}}
    assert windows(Shard(0, 1, stage=0, num_stages=4)) == {(8, 2, 8): {12}}
    assert windows(Shard(0, 1, stage=3, num_stages=4)) == {(8, 1, 8): {None}}


def test_experts_may_lie_whole(tmp_path):
    expected = said_by("gemma4_moe", tmp_path)
    logits = shared_logits(tmp_path, 2, enable_expert_parallel=True)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_moe", "gemma4_shared"])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"cache_dtype": "int8"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_rounded_models_are_shared_out(tmp_path, kind, changes):
    """Not to the last bit: scales belong to a rank's own part, and sums are rounded once more."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    if kind == "gemma4_moe":
        shape["moe_intermediate_size"] = 64
    directory = tiny_models.save(kind, tmp_path, **{**TWO_HEADS, **shape, "head_dim": 16})
    exact, alone = logits_of(load(directory)), logits_of(load(directory, **changes))
    whole = kind == "gemma4_moe" and "quantization" in changes
    shared = shared_logits(directory, 2, **changes, enable_expert_parallel=whole)
    assert (shared - exact).norm() < 1.5 * (alone - exact).norm()


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_shared"])
def test_each_row_equals_its_merged_model(kind, tmp_path):
    """Adapters of keys that double as values change both."""
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two, **TWO_HEADS)
    core, runner = engine(base, num_blocks=512, max_num_batched_tokens=17)
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    tokens = run(core, requests_of(adapters, prompts, order))
    runner._team.close()
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)


SCHEDULES = {
    "chunks of five": {"max_num_batched_tokens": 5},
    "overlapped": {"overlap": True},
    "passes": {"max_step_passes": 4},
    "preempted": {"num_blocks": 20},
    "swapped": {"num_blocks": 20, "offload_bytes": 2**16},
}
PROMPTS = tuple(tuple(range(begin, begin + count)) for begin, count in ((20, 37), (60, 30), (3, 5)))


@pytest.fixture(scope="module", params=["gemma4_moe", "gemma4_shared"])
def checkpoint(request, tmp_path_factory):
    """(directory, greedy continuations of the prompts by Hugging Face's generate)."""
    model = tiny_models.build(request.param, **TWO_HEADS)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, [tiny_models.greedy_tokens(model, each, NUM_OUTPUT) for each in PROMPTS]


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_texts_equal_hugging_face_under_any_schedule(checkpoint, name):
    directory, expected = checkpoint
    core, runner = engine(directory, **SCHEDULES[name])
    for again in range(2):  # the second round finds the first one's prefixes
        for index, each in enumerate(PROMPTS):
            core.add(request(f"{again}/{index}", each, GREEDY))
        texts = texts_of(core)
        assert [texts[f"{again}/{index}"] for index in range(len(PROMPTS))] == expected
    is_short = name in ("preempted", "swapped")
    assert (core.stats.num_preemptions > 0) == is_short
    assert core.stats.prefix_cache_hits > 0 or is_short
    assert (core.stats.tier.num_loaded > 0) == (name == "swapped")
    runner._team.close()


def plans_of(directory):
    """The memory plans of one process and of one of two ranks."""
    plans = []
    for size in (1, 2):
        _, runner = engine(directory, size)
        plans.append(runner.info.memory)
        if size > 1:
            runner._team.close()
    return plans


def test_a_rank_has_its_heads_of_each_kind(tmp_path):
    """One of two heads in two layers, the only one in the others: keys and values in float32."""
    alone, shared = plans_of(tiny_models.save("gemma4", tmp_path, **TWO_HEADS))
    assert alone.bytes_per_token == 2 * 4 * (2 * 2 * 8 + 2 * 16)
    assert shared.bytes_per_token == 2 * 4 * (2 * 1 * 8 + 2 * 16)


def test_each_tokens_embeddings_lie_with_one_rank(tmp_path):
    """Including those of the layers, which are most of a small model."""
    directory = tiny_models.save("gemma4_shared", tmp_path, **TWO_HEADS)
    alone, shared = plans_of(directory)
    assert shared.weights_bytes < 0.6 * alone.weights_bytes
    spec = read_config(str(directory)).spec
    cuts = [parameter_slices(spec, Shard(rank, 2))["per_layer.embedding"] for rank in range(2)]
    runs = [run for cut in cuts for run, _ in cut.row_ranges(None)]
    assert runs == [slice(0, 80), slice(80, 160)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "num_key_value_heads (3) neither divides it nor is divided by it"),
        (
            {**TWO_HEADS, "num_global_key_value_heads": 3},
            "num_global_key_value_heads (3) neither divides it nor is divided by it",
        ),
        ({**TWO_HEADS, "intermediate_size": 81}, "intermediate_size (81) cannot be divided by it"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(tmp_path, changes, problem):
    directory = tiny_models.save("gemma4_moe", tmp_path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        load_runner(EngineConfig(model=str(directory), tensor_parallel_size=2))
    assert str(caught.value) == f"tensor_parallel_size 2: {problem}"
