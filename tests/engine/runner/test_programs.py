"""Decode steps as captured programs: the same tokens, to the last bit, as steps from Python."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CacheConfig, Dtype, EngineConfig, Quantization, SchedulerConfig
from engine.core import EngineCore
from engine.models.decoder import Decoder
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from kernels.cpu import linear
from tests import tiny_models
from tests.tiny_shape import ABSENT

pytestmark = pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")
# Multiples of the panel size, as in widely used models.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
LATENT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"moe_intermediate_size": 32, "num_key_value_heads": 4},
}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
SHARED = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "mamba2": {
        **dict.fromkeys(("num_attention_heads", "intermediate_size"), ABSENT),
        "num_heads": 8,
    },
    "kimi_linear": {
        **{"head_dim": ABSENT, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32},
        **{"v_head_dim": 32, "moe_intermediate_size": 32, "num_key_value_heads": 4},
        "linear_head_dim": 16,
    },
    "bailing_hybrid": {
        **{"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"moe_intermediate_size": 32, "num_key_value_heads": 4},
    },
    "laguna": _EXPERTS,
    "step3p7": {
        **{"moe_intermediate_size": 32, "share_expert_dim": 64},
        "num_sliding_attention_heads": 6,
    },
    "lfm2_moe": {"moe_intermediate_size": 32},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "moe_intermediate_size": 32},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "deepseek_v3": {"q_lora_rank": 64},
    "deepseek_v32": {"q_lora_rank": 64, "index_head_dim": 32},
    "glm_moe_dsa": {"q_lora_rank": 64, "index_head_dim": 32},
    "axk2": {"q_lora_rank": 64, "index_head_dim": 32, "gated_norm_rank": 32},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Saves a tiny model once for all tests that use its kind."""
    saved: dict[str, str] = {}

    def save(kind: str, **changes: object) -> str:
        if kind not in saved:
            path = tiny_models.save(kind, tmp_path_factory.mktemp(kind), **changes)
            saved[kind] = str(path)
        return saved[kind]

    return save


def make(
    directory: str,
    *,
    eager: bool,
    quantization: Quantization | None = None,
    dtype: Dtype = "bfloat16",
    **scheduler,
) -> EngineCore:
    config = EngineConfig(
        model=directory,
        dtype=dtype,
        attention_backend="cpu",
        enforce_eager=eager,
        quantization=quantization,
        num_threads=2,
        cache=CacheConfig(block_size=4, num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, **scheduler),
    )
    return EngineCore(config, load_runner(config))


def live(core: EngineCore, seed: int, num_requests: int = 14) -> tuple[dict[str, list], int]:
    """The output of randomly arriving requests, and how many steps were programs.

    Most requests are plain; some need the ordinary sampler.
    """
    rng = random.Random(seed)
    told: dict[str, list] = {}
    programs = core._runner._graphs
    replayed = 0
    if programs is not None:
        load = programs.load

        def count(*arguments) -> None:
            nonlocal replayed
            replayed += 1
            load(*arguments)

        programs.load = count
    while core.has_work or len(told) < num_requests:
        if len(told) < num_requests and rng.random() < 0.4:
            extra = rng.choice(
                [{}, {}, {}, {"logprobs": 2}, {"frequency_penalty": 0.5}, {"logit_bias": {7: 3.0}}]
            )
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(1000),
                max_tokens=rng.randrange(1, 24),
                ignore_eos=True,
                **extra,
            )
            prompt = tuple(rng.randrange(3, 160) for _ in range(rng.randrange(1, 40)))
            request_id = str(len(told))
            told[request_id] = []
            core.add(Request(id=request_id, prompt_token_ids=prompt, sampling=sampling))
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told[row_id].append((tokens, output.logprobs.get(row_id)))
    return told, replayed


def texts(told: dict[str, list]) -> dict[str, list]:
    """All tokens and log-probabilities of each request, however steps are divided."""
    return {
        key: [(token, logprobs) for tokens, logprobs in parts for token in tokens]
        for key, parts in told.items()
    }


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("llama", None),
        ("llama", "int8"),
        ("llama", "int4"),
        ("qwen2", None),  # biases, and tied embeddings
        ("qwen2", "int8"),
        ("qwen3", None),  # per-head norms
        ("mistral", None),  # a window
        ("llama_yarn", None),
        ("mixtral", None),  # experts
        ("mixtral", "int4"),
        ("qwen2_moe", "int8"),  # and a shared one
        ("gpt_oss", None),  # with biases
        ("phimoe", None),  # chosen by another rule, and a bias of the head
        ("mimo_v2_flash", None),  # values narrower than keys
        ("deepseek_v2_lite", None),  # latent attention
        ("deepseek_v3", None),  # and experts in groups
        ("deepseek_v3", "int8"),
        ("deepseek_v32", None),  # positions that are selected, in each layer
        ("glm_moe_dsa", "int8"),  # and in an earlier one
        ("axk2", None),  # and gates of norms and attention
        ("qwen3_5_text", None),  # a state beside the cache, and gated attention outputs
        ("qwen3_5_text", "int8"),
        ("qwen3_next", None),  # and experts
        ("lfm2", None),  # a gated convolution
        ("mamba2", None),  # states alone
        ("jamba", None),  # of channels
        ("kimi_linear", None),  # decays of channels
        # Bounded ones, and gated heads of latent attention.
        pytest.param("bailing_hybrid", None, marks=pytest.mark.slow),
        # More heads in some layers, each with a gate.
        pytest.param("laguna", None, marks=pytest.mark.slow),
        ("step3p7", "int8"),  # and a clamp in some
        ("lfm2_moe", "int8"),
        ("gemma3", "int8"),  # tied and scaled embeddings
        ("gemma2", None),  # and a cap on logits
        ("apertus", None),  # a learned activation
        ("stablelm", "int8"),  # layer norms
        ("starcoder2", "int4"),  # and no gate
    ],
)
def test_the_same_bits_as_steps_from_python(model, kind: str, quantization) -> None:
    is_latent = "deepseek" in kind or kind in ("glm_moe_dsa", "axk2")
    shape = {**(LATENT if is_latent else SHAPE), **SHARED.get(kind, {})}
    directory = model(kind, **shape)
    # The number of passes in a step depends on the clock, and with it the composition of batches:
    # int4 products round differently for few rows than for many.
    steady = {"max_step_passes": 1} if quantization == "int4" else {}
    recorded = make(directory, eager=False, quantization=quantization, **steady)
    ordinary = make(directory, eager=True, quantization=quantization, **steady)
    for seed in (1, 2):
        told, replayed = live(recorded, seed)
        expected, _ = live(ordinary, seed)
        assert texts(told) == texts(expected)
        assert replayed > 15


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("llama", None), ("llama", "int8"), ("granite", None), ("gemma2", None), ("gemma2", "int8")],
)
def test_greedy_rows_alone_make_no_logits(
    model, kind: str, quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They choose the same tokens as next to a seeded row, which needs all logits.

    Also if logits are scaled or capped, and beside the prompts of others.
    """
    core = make(model(kind, **SHAPE), eager=False, quantization=quantization)
    prompts = [tuple(range(3 + i, 12 + 2 * i)) for i in range(5)]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def run(*others: Request) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for other in others:
            core.add(other)
        for i, prompt in enumerate(prompts):
            core.add(Request(id=str(i), prompt_token_ids=prompt, sampling=sampling))
        while core.has_work:
            output = core.step()
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                told.setdefault(row_id, []).extend(tokens)
        return {key: told[key] for key in map(str, range(len(prompts)))}

    seeded = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    expected = run(Request(id="seeded", prompt_token_ids=prompts[0], sampling=seeded))
    assert run() == expected
    programs = core._runner._graphs._programs
    made: list[int] = []
    for size, graph in programs.items():
        programs[size] = replace(graph, forward=lambda size=size: made.append(size))
    monkeypatch.setattr(Decoder, "logits", lambda decoder, hidden: made.append(len(hidden)))
    assert run() == expected
    assert not made


def test_results_read_after_the_next_step_was_computed(model) -> None:
    """When overlapped, a program runs again before its last results are read."""
    directory = model("llama", **SHAPE)
    told, replayed = live(make(directory, eager=False, overlap=True), 3)
    expected, _ = live(make(directory, eager=True), 3)
    assert texts(told) == texts(expected)
    assert replayed


def test_what_cannot_be_recorded_runs_as_ever_and_the_log_says_why(
    model, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32 products are done by torch."""
    directory = model("llama", **SHAPE)
    with caplog.at_level(logging.INFO):
        told, replayed = live(make(directory, eager=False, dtype="float32"), 4)
    assert caplog.text.count("decode steps are not recorded") == 1
    assert not replayed
    expected, _ = live(make(directory, eager=True, dtype="float32"), 4)
    assert texts(told) == texts(expected)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in tiny_models.FAMILIES else pytest.mark.slow)
        for kind in tiny_models.KINDS
        # Reductions between layers, and comparisons of experts' numbers, which are torch's.
        if not kind.startswith(("gemma3n", "longcat"))
    ],
)
def test_the_steps_of_each_family_are_recorded(kind: str, tmp_path: Path) -> None:
    """In widths that panels have to pad; the same bits as computed call by call."""
    directory = str(tiny_models.save(kind, tmp_path))
    told, replayed = live(make(directory, eager=False), 1, num_requests=8)
    expected, _ = live(make(directory, eager=True), 1, num_requests=8)
    assert texts(told) == texts(expected)
    assert replayed > 15
