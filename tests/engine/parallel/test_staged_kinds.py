"""Pipeline stages of models with several kinds of layers.

Stateful models, and Gemma 4, which has two kinds of heads, embeddings of each layer, and layers
that read the keys and values of another.
"""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.weights import parameters
from engine.parallel.shard import Shard, parameter_slices
from engine.parallel.stages import max_stages, stage_layers
from engine.runner import load_runner
from engine.types import SamplingParams
from tests import tiny_gemmas, tiny_hybrids, tiny_models
from tests.engine.handmade import load, request
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run
from tests.engine.parallel.test_shared_logits import logits_of, prompt
from tests.engine.parallel.test_shared_texts import engine, texts_of
from tests.engine.parallel.test_staged_logits import staged_logits

_LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_FOUR = {"num_hidden_layers": 4}
_JAMBA = {**_FOUR, "attn_layer_period": 2}
_CONVS = {**_LAYERS, "layer_types": ["conv", "full_attention"] * 2}
_MAMBAS = {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}
_GROUPS = {**_MAMBAS, "mamba_n_groups": 2}
_DELTA = {**_LAYERS, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
_NEMOTRON = ["linear_attention", "mlp", "full_attention"]
_TWO_HEADS = {"num_key_value_heads": 2}
# Two stages have an attention layer each, and two ranks of one have equal parts.
CHANGES = {
    **dict.fromkeys(tiny_hybrids.HYBRIDS, _LAYERS),
    **dict.fromkeys(("lfm2", "lfm2_adjusted", "lfm2_moe", "lfm3_ungated"), _CONVS),
    **dict.fromkeys(("falcon_h1", "falcon_h1_norm", "mamba2", "mamba2_tied"), _FOUR),
    **dict.fromkeys(("mamba", "mamba_biased", "falcon_mamba"), _FOUR),
    **dict.fromkeys(("jamba", "jamba_dense"), _JAMBA),
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    **dict.fromkeys(("olmo_hybrid", "olmo_hybrid_nope"), _DELTA),
    **dict.fromkeys(("bamba", "bamba_limited"), _GROUPS),
    "nemotron_h": {"layers_block_type": [*_NEMOTRON, "linear_attention", "full_attention"]},
    "nemotron_h_latent": {"layers_block_type": [*_NEMOTRON, "moe", *_NEMOTRON, "moe"]},
    "nemotron_h_moe": {"layers_block_type": [*_NEMOTRON, "moe", *_NEMOTRON, "moe"]},
    "nemotron_h_biased": {"layers_block_type": [_NEMOTRON[-1], *_NEMOTRON]},
    **dict.fromkeys(tiny_gemmas.GEMMAS, _TWO_HEADS),
}
# They differ from others only in what stages do not divide.
LIKE_OTHERS = {
    *("olmo_hybrid_nope", "lfm2_adjusted", "granitemoehybrid_attention", "bamba_limited"),
    *("nemotron_h_biased", "falcon_h1_norm", "lfm3_ungated", "mamba2_tied"),
    *("mamba_biased", "falcon_mamba", "jamba_dense"),
    *("qwen3_5_moe_text", "granitemoehybrid_dense", "lfm2", "gemma4_unified"),
}
NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ()) for kind in CHANGES],
)
def test_two_stages_compute_what_one_process_does(tmp_path, kind):
    """Bit for bit, since nothing is summed over ranks.

    The result of one process is compared with Hugging Face's in ``tests/engine/models``.
    """
    directory = tiny_models.save(kind, tmp_path, **CHANGES[kind])
    alone = logits_of(load(directory, enforce_eager=True))
    torch.testing.assert_close(staged_logits(directory, 2), alone, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_5_text", {"dtype": "bfloat16", "quantization": "int8"}),
        ("granitemoehybrid", {"dtype": "bfloat16"}),
        ("gemma4_shared", {"dtype": "bfloat16", "quantization": "int4"}),
        ("gemma4", {"cache_dtype": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rounded_stages_compute_what_one_process_does(tmp_path, kind, changes):
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    if kind == "granitemoehybrid":
        shape |= {"mamba_n_heads": 8, "mamba_d_head": 48}
    directory = tiny_models.save(kind, tmp_path, **CHANGES[kind], **shape)
    alone = logits_of(load(directory, enforce_eager=True, **changes))
    torch.testing.assert_close(staged_logits(directory, 2, **changes), alone, atol=0, rtol=0)


@pytest.mark.parametrize("stages", [3, 4])
def test_each_layer_of_gemma_by_itself(tmp_path, stages):
    """Then each stage has only one kind of heads."""
    directory = tiny_models.save("gemma4", tmp_path)
    alone = logits_of(load(directory, enforce_eager=True))
    torch.testing.assert_close(staged_logits(directory, stages), alone, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("qwen3_5_text", {}),
        ("lfm2_moe", {"enable_expert_parallel": True}),
        ("granitemoehybrid", {}),
        ("gemma4_shared", {}),
        ("gemma4_moe", {"enable_expert_parallel": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_two_stages_of_two_ranks_say_what_hugging_face_says(tmp_path, kind, experts):
    model = tiny_models.build(kind, **CHANGES[kind])
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    logits = staged_logits(tmp_path, 2, 2, **experts)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma4_shared"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_parameter_lies_in_one_stage(tmp_path, kind, size):
    whole = read_config(str(tiny_models.save(kind, tmp_path, **CHANGES[kind]))).spec
    held = [
        parameter_slices(whole, Shard(0, size, stage=stage, num_stages=2)) for stage in range(2)
    ]
    names = [name for cuts in held for name in cuts]
    assert sorted(names) == sorted(parameters(whole))


SCHEDULES = {
    "chunks of five": {"max_num_batched_tokens": 5},
    "one step at a time": {"overlap": False},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 20},
}
PROMPTS = tuple(tuple(range(begin, begin + count)) for begin, count in ((20, 37), (60, 30), (3, 5)))


@pytest.fixture(
    scope="module", params=["qwen3_5_text", "lfm2_moe", "granitemoehybrid", "gemma4_shared"]
)
def checkpoint(request, tmp_path_factory):
    """(directory, greedy continuations of the prompts by Hugging Face's generate)."""
    model = tiny_models.build(request.param, **CHANGES[request.param])
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, [tiny_models.greedy_tokens(model, each, NUM_OUTPUT) for each in PROMPTS]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_texts_equal_hugging_face_under_any_schedule(checkpoint, name, size):
    """The second round starts from the first one's prefixes, and the snapshots at their ends."""
    directory, expected = checkpoint
    core, runner = engine(directory, size, 2, **SCHEDULES[name])
    for again in range(2):
        for index, each in enumerate(PROMPTS):
            core.add(request(f"{again}/{index}", each, GREEDY))
        texts = texts_of(core)
        assert [texts[f"{again}/{index}"] for index in range(len(PROMPTS))] == expected
    assert (core.stats.num_preemptions > 0) == (name == "preempted")
    assert core.stats.prefix_cache_hits >= 36 + 28 + 4 or name == "preempted"
    assert core.check() == []
    runner._team.close()


@pytest.mark.parametrize("kind", ["lfm2", "gemma4"])
def test_each_row_has_its_adapter_in_every_stage(kind, tmp_path):
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two, **CHANGES[kind])
    core, runner = engine(base, 1, 2, num_blocks=512, max_num_batched_tokens=17)
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    tokens = run(core, requests_of(adapters, prompts, order))
    runner._team.close()
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)


def test_a_stage_has_the_states_of_its_layers(tmp_path):
    """Twice as many states as running sequences: a step in flight holds its rows."""
    directory = tiny_models.save("qwen3_5_text", tmp_path, **_LAYERS)
    plans = []
    for stages in (1, 2):
        _, runner = engine(directory, 1, stages, max_num_seqs=3)
        plans.append(runner.info.memory)
        if stages > 1:
            (num_lines,) = {len(layer.conv_state) for layer in runner._snapshots._states}
            assert num_lines == 2 * 3 + 1 + plans[-1].num_snapshots
            runner._team.close()
    alone, staged = plans
    assert (staged.num_states, staged.num_snapshots) == (3, alone.num_snapshots)
    a_line = alone.state_bytes // (3 + 1 + alone.num_snapshots)
    assert 2 * staged.state_bytes == a_line * (2 * 3 + 1 + staged.num_snapshots)


@pytest.mark.parametrize(
    ("layers", "stages"),
    [("rrrara", [(0, 4), (4, 6)]), ("arrrrr", [(0, 6)]), ("raaarr", [(0, 2), (2, 3), (3, 6)])],
)
def test_each_stage_has_a_layer_that_attends(tmp_path, layers, stages):
    kinds = {"r": "linear_attention", "a": "full_attention"}
    shape = {"num_hidden_layers": len(layers), "layer_types": [kinds[each] for each in layers]}
    spec = read_config(str(tiny_models.save("qwen3_5_text", tmp_path, **shape))).spec
    assert max_stages(spec) == len(stages)
    assert stage_layers(spec, len(stages)) == stages


def test_layers_that_share_keys_lie_together(tmp_path):
    """Of six layers, the last three read the keys and values of layers 1 and 2."""
    spec = read_config(str(tiny_models.save("gemma4_shared", tmp_path))).spec
    assert max_stages(spec) == 2
    assert stage_layers(spec, 2) == [(0, 1), (1, 6)]


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("gemma4_shared", "2 stages"),
        ("granitemoehybrid", "1 stage"),
        ("glm_moe_dsa", "2 stages"),
        ("longcat_flash", "2 stages"),
    ],
)
def test_more_stages_than_that_are_refused(tmp_path, kind, most):
    directory = tiny_models.save(kind, tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        load_runner(EngineConfig(model=str(directory), pipeline_parallel_size=3))
    layers = read_config(str(directory)).spec.num_layers
    assert str(caught.value) == (
        f"pipeline_parallel_size 3: the model's {layers} layers make {most} at most: each has keys "
        "and values of its own, and those that share them, a selection or experts lie together"
    )
