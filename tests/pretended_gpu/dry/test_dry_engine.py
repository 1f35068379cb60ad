"""Texts of the engine on a pretended GPU equal those of plain torch, one step after the other.

The overlapped loop, captured and eager steps, transfers and kernels are the same as on a real GPU;
the host never waits within a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import SpeculationConfig
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from tests import tiny_draft_heads, tiny_models
from tests.engine.replays import count_draft_replays, count_prompt_replays
from tests.pretended_gpu.engines import config_of, on_cpu, on_pretended_gpu, texts
from tests.pretended_gpu.stand_in import pretended_gpu

ANY_WAY = (
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, logit_bias={30: 4.0}, max_tokens=2),
    SamplingParams(
        temperature=0.8,
        seed=7,
        allowed_token_ids=(30, 31, 90),
        bad_token_ids=((30, 31), (31, 30)),
        logprobs=2,
        max_tokens=2,
    ),
)
PLAIN = ANY_WAY[:2]
_KEEPS_LAYERS = (
    *("llama4", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_5_text", "granitemoehybrid"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("gemma4", "gemma4_moe", "gemma4_shared", "nemotron_h_moe", "falcon_h1", "kimi_linear"),
)
# The first one repeats a single token.
REPEATING = (
    SamplingParams(temperature=0.0, logit_bias={21: 50.0}, max_tokens=8, ignore_eos=True),
    *(msgspec.structs.replace(sampling, max_tokens=6) for sampling in ANY_WAY[1:]),
)


def requests_of(samplings: tuple[SamplingParams, ...], longest: int = 6) -> list[Request]:
    """Prompts of different lengths."""
    return [
        Request(
            id=str(index),
            prompt_token_ids=tuple(20 + (7 * index + i) % 90 for i in range(longest - index)),
            sampling=sampling,
        )
        for index, sampling in enumerate(samplings)
    ]


def request_of(name: str, prompt: Sequence[int], sampling: SamplingParams) -> Request:
    return Request(id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("qwen3", tmp_path_factory.mktemp("qwen3"))


def saved(kind: str, directory: Path) -> str:
    layers = {} if kind in _KEEPS_LAYERS else {"num_hidden_layers": 1}
    return str(tiny_models.save(kind, directory, **layers))


@pytest.mark.parametrize(
    "eager", ["main", *(pytest.param(other, marks=pytest.mark.slow) for other in ("none", "side"))]
)
def test_texts_are_those_of_plain_torch(qwen3: str, eager: str) -> None:
    config, requests = config_of(qwen3), requests_of(ANY_WAY)
    expected = on_cpu(config, requests)
    with on_pretended_gpu(config, eager) as rig:
        assert texts(rig.core, requests) == expected


def test_nothing_is_compiled_while_requests_wait(qwen3: str) -> None:
    """Except for the first prompt. Features that only some requests use have been rehearsed."""
    with on_pretended_gpu(config_of(qwen3)) as rig:
        texts(rig.core, requests_of(PLAIN))
        assert not rig.launches.new(lambda: texts(rig.core, requests_of(ANY_WAY[::-1], 9)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "kimi_linear", "mamba"])
def test_the_first_prompt_compiles_what_longer_ones_need(kind: str, tmp_path: Path) -> None:
    """Some prompts advance states token by token, others in chunks."""
    with on_pretended_gpu(config_of(saved(kind, tmp_path))) as rig:
        texts(rig.core, requests_of(PLAIN))
        new = rig.launches.new(lambda: texts(rig.core, requests_of(PLAIN, 60)))
        # If texts may be longer than here, it is compiled with the captured steps.
        assert {kernel for kernel, _ in new} <= {"_merge_kernel"}


def test_experts_are_rehearsed_in_the_models_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A router may have another, and a GPU multiplies no two."""
    config = config_of(saved("deepseek_v3", tmp_path), dtype="float16", enforce_eager=True)
    with pretended_gpu("main"), caplog.at_level("WARNING"):
        runner = load_runner(config)
        while runner.prepare():
            pass
    assert "cannot be rehearsed" not in caplog.text


def test_a_row_that_pads_has_no_place_in_a_table_of_positions(tmp_path: Path) -> None:
    config = config_of(saved("gpt2", tmp_path), scheduler={"max_num_seqs": 1})
    with on_pretended_gpu(config, "main"):
        pass


@pytest.mark.slow
def test_a_prompt_begins_with_a_snapshot_that_nobody_waited_for(tmp_path: Path) -> None:
    config = config_of(saved("lfm2", tmp_path))
    first, again = ([request_of(name, range(20, 56), PLAIN[0])] for name in ("first", "again"))
    expected = on_cpu(config, first)["first"]
    with on_pretended_gpu(config) as rig:
        assert texts(rig.core, first)["first"] == expected
        assert texts(rig.core, again)["again"] == expected
        assert rig.core.stats.prefix_cache_hits == 32


@pytest.mark.slow
def test_kernels_that_are_right_are_taken(qwen3: str) -> None:
    with on_pretended_gpu(config_of(qwen3, attention_backend="auto")) as rig:
        assert rig.core.info.attention_backend == "triton"


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {}),
    "caps": ("gemma2", {}),
    "latents and experts": ("deepseek_v3", {}),
    "selections": ("deepseek_v32", {}),
    "selections of another layer": ("glm_moe_dsa", {}),
    "sinks and experts": ("gpt_oss", {}),
    "chunks": ("llama4", {}),
    "learned positions": ("gpt2", {}),
    "heads of several kinds": ("gemma4", {}),
    "experts beside an MLP": ("gemma4_moe", {}),
    "shared keys and values": ("gemma4_shared", {}),
    "gated delta rules": ("qwen3_5_text", {}),
    "convolutions": ("lfm2", {}),
    "selective scans": ("granitemoehybrid", {}),
    "layers without an MLP, experts without a gate": ("nemotron_h_moe", {}),
    "states alone": ("mamba2", {}),
    "decays by channel": ("kimi_linear", {}),
    "scans by channel": ("falcon_mamba", {}),
    "cache of codes": ("qwen3", {"cache": {"dtype": "int8"}}),
    "batch-invariant": ("qwen3", {"batch_invariant": True}),
    "batch-invariant, window": ("mistral", {"batch_invariant": True}),
    "batch-invariant experts": ("deepseek_v3", {"batch_invariant": True, "dtype": "float16"}),
    "batch-invariant selections": ("deepseek_v32", {"batch_invariant": True, "dtype": "float16"}),
    "batch-invariant codes": (
        "qwen3_moe",
        {"batch_invariant": True, "dtype": "float16", "quantization": "int8"},
    ),
}


# With attention that is planned on the host.
_PROMPTS_ARE_LAUNCHED = ("deepseek_v32", "glm_moe_dsa", "llama4")


@pytest.mark.slow
@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_serve_without_waiting(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[name]
    config, requests = config_of(saved(kind, tmp_path), **changes), requests_of(PLAIN, 24)
    expected = on_cpu(config, requests)
    with on_pretended_gpu(config, "main", prompt_sizes=(48,)) as rig:
        replayed = count_prompt_replays(rig.core)
        assert texts(rig.core, requests) == expected
    assert any(replayed) == (kind not in _PROMPTS_ARE_LAUNCHED)


@pytest.mark.slow
@pytest.mark.parametrize("eager", ["none", "main", "side"])
def test_blocks_come_back_from_the_host(eager: str, tmp_path: Path) -> None:
    """Three texts alternate in a cache that holds one and a half."""
    cache = {"num_blocks": 6, "offload_bytes": 2**20}
    config, params = config_of(saved("mistral", tmp_path), cache=cache), PLAIN[0]
    rounds = [
        [request_of(f"{turn}-{nth}", range(10 + nth, 50 + nth), params) for nth in range(3)]
        for turn in range(2)
    ]
    expected = [on_cpu(config, requests) for requests in rounds]
    with on_pretended_gpu(config, eager) as rig:
        assert [texts(rig.core, requests) for requests in rounds] == expected
        assert rig.core.stats.tier.num_loaded > 0


# The drafting method, its model, and how drafts of sampled texts are verified.
GUESSERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "ngram": (None, {"method": "ngram", "min_ngram": 1}),
    "ngram, rejection": (None, {"method": "ngram", "min_ngram": 1, "draft_sampling": "rejection"}),
    "the model": ("qwen3", {"method": "draft"}),
    "another model": ("gemma2", {"method": "draft"}),
    "another model, rejection": ("gemma2", {"method": "draft", "draft_sampling": "rejection"}),
}


def requests_with_drafts(*, guesses_are_known: bool) -> list[Request]:
    """Texts that repeat themselves. The masks after drafts depend on the drafts."""
    samplings = REPEATING if guesses_are_known else REPEATING[:-1]
    return [request_of(f"{n}", (21, 22, 23) * 4, sampling) for n, sampling in enumerate(samplings)]


ALWAYS_RUN = ("ngram, rejection", "main")


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        pytest.param(*case, marks=() if case == ALWAYS_RUN else pytest.mark.slow)
        for case in itertools.product(GUESSERS, ("none", "main", "side"))
    ],
)
def test_drafts_are_made_and_judged_without_waiting(
    qwen3: str, name: str, eager: str, tmp_path: Path
) -> None:
    kind, given = GUESSERS[name]
    draft_model = None if kind is None else saved(kind, tmp_path)
    guessing = SpeculationConfig(
        adaptive=False, num_draft_tokens=3, draft_model=draft_model, **given
    )
    limits: dict[str, Any] = {"max_num_seqs": 16}  # so that steps with drafts are captured
    if guessing.draft_sampling == "rejection":
        # Sampled texts depend on the positions of drafts, and so on when steps are planned.
        limits["overlap"] = False
    config = config_of(qwen3, speculation=guessing, scheduler=limits)
    plain = config if guessing.draft_sampling == "rejection" else config_of(qwen3)
    requests = requests_with_drafts(guesses_are_known=kind is None)
    expected = on_cpu(plain, requests)
    with on_pretended_gpu(config, eager) as rig:
        assert texts(rig.core, requests) == expected
        drafts = rig.core.stats.drafts
        assert drafts.num_draft_tokens > 0
        assert kind != "qwen3" or drafts.num_accepted_tokens == drafts.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_states_are_fed_what_stays_of_drafts_without_waiting(kind: str, tmp_path: Path) -> None:
    guessing = SpeculationConfig(method="ngram", min_ngram=1, adaptive=False, num_draft_tokens=3)
    model = saved(kind, tmp_path)
    requests = requests_with_drafts(guesses_are_known=True)
    expected = on_cpu(config_of(model), requests)
    config = config_of(model, speculation=guessing, scheduler={"max_num_seqs": 8})
    with on_pretended_gpu(config, "main") as rig:
        replays = count_draft_replays(rig.core._runner._graphs)
        assert texts(rig.core, requests) == expected
        drafts = rig.core.stats.drafts
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
        assert any(replays)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram, rejection", "another model, rejection"])
def test_nothing_is_compiled_for_drafts_while_requests_wait(name: str, tmp_path: Path) -> None:
    """Except for the first request with drafts. Their sampling has been rehearsed."""
    # In the last layer a prompt's MLP sees only one token: the first request with several compiles.
    layers = {"num_hidden_layers": 2}
    model = str(tiny_models.save("qwen3", tmp_path / "model", **layers))
    kind, given = GUESSERS[name]
    draft_model = kind and str(tiny_models.save(kind, tmp_path / "draft", **layers))
    guessing = SpeculationConfig(
        adaptive=False, num_draft_tokens=3, draft_model=draft_model, **given
    )
    with on_pretended_gpu(config_of(model, speculation=guessing)) as rig:
        first, *others = requests_with_drafts(guesses_are_known=kind is None)
        texts(rig.core, [first])
        assert not rig.launches.new(lambda: texts(rig.core, others))


@pytest.mark.slow
def test_a_head_guesses_without_waiting(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    head = tiny_draft_heads.build("eagle3", model).save(tmp_path / "head")
    model.save_pretrained(tmp_path)
    guessing = SpeculationConfig(
        method="eagle", adaptive=False, num_draft_tokens=3, draft_model=str(head)
    )
    config = config_of(str(tmp_path), speculation=guessing)
    requests = requests_with_drafts(guesses_are_known=False)
    expected = on_cpu(config_of(str(tmp_path)), requests)
    with on_pretended_gpu(config, "main", prompt_sizes=(48,)) as rig:
        replayed = count_prompt_replays(rig.core)
        assert texts(rig.core, requests) == expected
        assert rig.core.stats.drafts.num_draft_tokens > 0
    assert any(replayed)
