"""Stateful models on several ranks.

Each rank has the states of its heads or channels, and texts equal Hugging Face's under any
schedule.
"""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.runner import load_runner
from engine.types import SamplingParams
from tests import tiny_hybrids, tiny_models
from tests.engine.handmade import load, request
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run
from tests.engine.parallel.test_shared_logits import logits_of, prompt, shared_logits
from tests.engine.parallel.test_shared_texts import engine, texts_of
from tests.engine.quantization.test_formats import _write

_OLMO = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
# Widths that two ranks can share equally.
CHANGES = {
    "olmo_hybrid": _OLMO,
    "olmo_hybrid_nope": _OLMO,
    "bamba": {"mamba_n_groups": 2, "mlp_bias": True},
}
# They differ from others only in what is not sharded.
LIKE_OTHERS = {
    *("olmo_hybrid_nope", "lfm2_adjusted", "granitemoehybrid_attention", "bamba_limited"),
}
NUM_OUTPUT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def said_by(kind, directory, **changes) -> torch.Tensor:
    """Hugging Face's logits for the prompt; also saves the model in the directory."""
    model = tiny_models.build(kind, **{**CHANGES.get(kind, {}), **changes})
    model.save_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ())
        for kind in tiny_hybrids.HYBRIDS
    ],
)
def test_two_ranks_say_what_hugging_face_says(tmp_path, kind):
    expected = said_by(kind, tmp_path)
    torch.testing.assert_close(shared_logits(tmp_path, 2), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "size", "changes"),
    [
        # Two ranks have the same key head.
        ("qwen3_5_text", 4, {"num_attention_heads": 8}),
        # Three ranks share the heads of one group.
        ("granitemoehybrid_dense", 3, {"num_key_value_heads": 3, "shared_intermediate_size": 48}),
        ("bamba", 3, {"num_key_value_heads": 3, "intermediate_size": 96, "mamba_n_groups": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_more_ranks_than_key_heads_and_groups(tmp_path, kind, size, changes):
    expected = said_by(kind, tmp_path, **changes)
    torch.testing.assert_close(shared_logits(tmp_path, size), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "kind",
    ["qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h_moe", "nemotron_h_latent"],
)
def test_experts_may_lie_whole(tmp_path, kind):
    expected = said_by(kind, tmp_path)
    logits = shared_logits(tmp_path, 2, enable_expert_parallel=True)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


_WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen3_5_text", {"linear_key_head_dim": 16, "linear_value_head_dim": 32}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}),
        ("granitemoehybrid_dense", {"mamba_n_heads": 8, "mamba_d_head": 48}),
        ("nemotron_h", {"mamba_num_heads": 8, "mamba_head_dim": 32}),
        ("qwen3_next", {"moe_intermediate_size": 64, "linear_value_head_dim": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_rounded_models_are_shared_out(tmp_path, kind, shape, quantization):
    """Not to the last bit: scales belong to a rank's own part, and sums are rounded once more."""
    directory = tiny_models.save(kind, tmp_path, **_WIDE, **shape)
    changes = {"dtype": "bfloat16", "quantization": quantization}
    exact, alone = logits_of(load(directory)), logits_of(load(directory, **changes))
    shared = shared_logits(directory, 2, **changes)
    assert (shared - exact).norm() < 1.5 * (alone - exact).norm()


_DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 3},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "hidden_size": 128},
}
# Groups of inputs end where ranks' inputs do.
WIDTHS = {
    "qwen3_next": {**_DELTA, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 8},
    "lfm2": {"num_hidden_layers": 3, "hidden_size": 128, "block_auto_adjust_ff_dim": False},
}


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("qwen3_next", "w8a8"),
        pytest.param("qwen3_next", "gptq4", marks=pytest.mark.slow),
        ("olmo_hybrid", "w8a8"),
        ("lfm2", "w4a16"),
    ],
)
def test_codes_of_files_are_shared_out_as_they_are(tmp_path, monkeypatch, kind, written):
    """Including those in which key heads are interleaved, as in Qwen3-Next."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # to the last bits
    shape = {"intermediate_size": 256, **WIDTHS[kind]}
    directory, _ = _write(kind, written, tmp_path, expect=False, **shape)
    expected = logits_of(load(directory))  # test_formats.py compares them with Hugging Face
    torch.testing.assert_close(shared_logits(directory, 2), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "granitemoehybrid_dense", pytest.param("lfm2", marks=pytest.mark.slow)]
)
def test_each_row_equals_its_merged_model(kind, tmp_path):
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two)
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
    "preempted": {"num_blocks": 18},
}
PROMPTS = tuple(tuple(range(begin, begin + count)) for begin, count in ((20, 37), (60, 30), (3, 5)))


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2_moe", "granitemoehybrid"])
def checkpoint(request, tmp_path_factory):
    """(directory, greedy continuations of the prompts by Hugging Face's generate)."""
    model = tiny_models.build(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, [tiny_models.greedy_tokens(model, each, NUM_OUTPUT) for each in PROMPTS]


def texts_in_rounds(core, expected) -> None:
    """The second round starts from snapshots of the first one's prompts, on every rank."""
    for again in range(2):
        for index, each in enumerate(PROMPTS):
            core.add(request(f"{again}/{index}", each, GREEDY))
        texts = texts_of(core)
        assert [texts[f"{again}/{index}"] for index in range(len(PROMPTS))] == expected
    assert core.check() == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_texts_equal_hugging_face_under_any_schedule(checkpoint, name):
    directory, expected = checkpoint
    core, runner = engine(directory, **SCHEDULES[name])
    texts_in_rounds(core, expected)
    assert (core.stats.num_preemptions > 0) == (name == "preempted")
    assert core.stats.prefix_cache_hits >= 36 + 28 + 4 or name == "preempted"
    runner._team.close()


def test_a_rank_has_the_states_of_its_heads(checkpoint):
    directory, _ = checkpoint
    plans = []
    for size in (1, 2):
        _, runner = engine(directory, size, max_num_seqs=3)
        plans.append(runner.info.memory)
        if size > 1:
            runner._team.close()
    alone, shared = plans
    assert (shared.num_states, shared.num_snapshots) == (alone.num_states, alone.num_snapshots)
    # In Mamba-2, each rank with heads of a group also has what these share.
    assert 2 * shared.state_bytes == alone.state_bytes
    assert "states of 3 sequences" in shared.describe()


REFUSED = {
    "linear_num_key_heads (3) neither divides it nor is divided by it": (
        "olmo_hybrid",
        {"linear_num_value_heads": 6},
    ),
    "linear_num_value_heads (3) cannot be divided by it": (
        "olmo_hybrid",
        {"linear_num_key_heads": 1},
    ),
    "mamba_n_groups (3) is more than one and cannot be divided by it": ("bamba", {}),
    "n_groups (3) is more than one and cannot be divided by it": ("nemotron_h", {"n_groups": 3}),
    "mamba_num_heads (3) cannot be divided by it": (
        "nemotron_h",
        {"mamba_num_heads": 3, "n_groups": 1},
    ),
    "num_heads (3) cannot be divided by it": (
        "mamba2",
        {"num_heads": 3, "head_dim": 32, "n_groups": 1},
    ),
    "expand * hidden_size (45) cannot be divided by it": ("mamba", {"intermediate_size": 45}),
    "mamba_n_heads (3) cannot be divided by it": (
        "bamba",
        {"mamba_n_heads": 3, "mamba_d_head": 48, "mamba_n_groups": 1},
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_does_not_divide_is_refused_by_name(tmp_path, problem):
    kind, changes = REFUSED[problem]
    directory = tiny_models.save(kind, tmp_path)
    tiny_models.edit_config(directory, **changes)
    with pytest.raises(ModelLoadError) as caught:
        load_runner(EngineConfig(model=str(directory), tensor_parallel_size=2))
    assert str(caught.value) == f"tensor_parallel_size 2: {problem}"
