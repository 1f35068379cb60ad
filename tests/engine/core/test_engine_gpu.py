"""The whole engine on a GPU, overlapped and with captured steps, has the same output as on a CPU.

In float32, where the two differ by less than the margins between tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.config import CacheConfig, Device, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.paths import default_model_dir
from engine.runner.model_runner import ModelRunner
from engine.types import Adapter, Request, SamplingParams, StepPlan
from tests import tiny_models, tiny_vision
from tests.engine.replays import count_prompt_replays
from tests.image_prompts import ask, rules_of
from tools.quantize.questions import count_correct_answers, read_questions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE: Device = "cuda"
HELDOUT = Path(__file__).parents[2] / "demo" / "heldout.jsonl"
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=5, min_p=0.05, max_tokens=25, ignore_eos=True),
    SamplingParams(
        seed=2, frequency_penalty=1.5, repetition_penalty=1.3, max_tokens=18, ignore_eos=True
    ),
    SamplingParams(seed=5, logit_bias={30: 4.0}, logprobs=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, min_tokens=9, prompt_logprobs=1, max_tokens=30),
    SamplingParams(
        temperature=0.8,
        seed=7,
        allowed_token_ids=(30, 31, 90),
        bad_token_ids=((30, 31), (31, 30)),
        max_tokens=9,
    ),
)


def load(directory: Path, device: Device, **changes: Any) -> EngineCore:
    """An engine with so few blocks that it preempts, and so small steps that it splits prompts."""
    on_gpu = device == "cuda"
    changes.setdefault("attention_backend", "triton" if on_gpu else "reference")
    changes.setdefault("cache", CacheConfig(block_size=4, num_blocks=24))
    limits = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=32, overlap=on_gpu)
    return EngineCore.load(
        EngineConfig(
            model=str(directory), device=device, dtype="float32", scheduler=limits, **changes
        )
    )


def told_by(core: EngineCore, adapters: tuple[Adapter | None, ...] = (None,)) -> list[Any]:
    """Tokens and alternatives of each request, over two rounds.

    The second round has its prompts cached and everything captured.
    """
    told: dict[str, list[Any]] = {}
    for turn in range(2):
        for index, sampling in enumerate(SAMPLINGS):
            prompt = tuple(20 + (7 * index + i) % 90 for i in range(3 + 6 * index))
            adapter = adapters[index % len(adapters)]
            core.add(
                Request(
                    id=f"{turn} {index}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    adapter=adapter,
                )
            )
        while core.has_work:
            output = core.step()
            assert not output.errors
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                told.setdefault(row_id, []).extend(tokens)
                alternatives = [entry.top_ids for entry in output.logprobs.get(row_id, ())]
                told.setdefault(f"{row_id}, alternatives", []).extend(alternatives)
        while core.prepare():
            pass
    assert core.stats.blocks.held == 0
    return sorted(told.items())


def count_replays(core: EngineCore) -> list[bool]:
    """Record whether each decode step from now on was captured."""
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    graphs = runner._graphs
    assert graphs is not None
    found: list[bool] = []
    find = graphs.find

    def counting(batch: Any, **more: Any) -> Any:
        graph = find(batch, **more)
        found.append(graph is not None)
        return graph

    graphs.find = counting
    return found


def texts_about_images(core: EngineCore, directory: Path) -> dict[str, list[int]]:
    """The texts of two rounds, the second with everything captured."""
    rules = rules_of(directory)
    told: dict[str, list[int]] = {}
    for turn in range(2):
        for index, shapes in enumerate((((2, 3),), ((1, 1), (3, 2)), ())):
            core.add(ask(f"{turn} {index}", rules, 2 * index + turn, SAMPLINGS[0], shapes))
        while core.has_work:
            output = core.step()
            assert not output.errors
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                told.setdefault(row_id, []).extend(tokens)
        while core.prepare():
            pass
    return told


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3"])
def test_texts_about_images_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    tiny_vision.save(kind, tmp_path)
    cache = CacheConfig(block_size=4, num_blocks=48)
    core = load(tmp_path, DEVICE, cache=cache)
    found = count_replays(core)
    told = texts_about_images(core, tmp_path)
    assert any(found)
    assert told == texts_about_images(load(tmp_path, "cpu", cache=cache), tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3", "mistral", "gemma2", "phi4_mini", "gpt_oss", "qwen3_moe", "deepseek_v3"),
        *("gpt2", "llama4", "qwen3_next", "lfm2", "granitemoehybrid"),
    ],
)
def test_texts_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    directory = tiny_models.save(kind, tmp_path)
    core = load(directory, DEVICE)
    found, prompts = count_replays(core), count_prompt_replays(core)
    assert told_by(core) == told_by(load(directory, "cpu"))
    assert sum(found) > 20
    assert not prompts or sum(prompts) > 2
    assert kind != "qwen3" or prompts
    assert kind != "qwen3" or core.stats.num_preemptions > 0


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        SpeculationConfig(method="ngram", adaptive=False),
        SpeculationConfig(method="ngram", adaptive=False, draft_sampling="rejection"),
    ],
    ids=["alone", "coupled", "rejection"],
)
def test_no_launch_waits_for_the_device(
    speculation: SpeculationConfig | None, tmp_path: Path
) -> None:
    """Each step is launched while the previous one runs, whatever it is asked for."""
    core = load(tiny_models.save("qwen3", tmp_path), DEVICE, speculation=speculation)
    told_by(core)  # compiled and captured
    runner = core._runner
    launch = runner.launch
    waits: list[RuntimeError] = []

    def strictly(plan: StepPlan) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        except RuntimeError as error:
            waits.append(error)
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = strictly
    told_by(core)
    assert not waits


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft"])
def test_drafts_change_no_text(method: Any, tmp_path: Path) -> None:
    directory = tiny_models.save("qwen3", tmp_path)
    draft_model = str(directory) if method == "draft" else None
    speculation = SpeculationConfig(method=method, adaptive=False, draft_model=draft_model)
    drafted = load(directory, DEVICE, speculation=speculation)
    assert told_by(drafted) == told_by(load(directory, "cpu"))
    assert drafted.stats.drafts.num_accepted_tokens > 0


def test_adapters_change_texts_as_on_a_cpu(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory = tiny_models.save("llama", tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT and transformers warn about each other
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
        adapted = peft.get_peft_model(tiny_models.build("llama"), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        adapted.save_pretrained(tmp_path / "adapter")
    adapter = Adapter(id="a", name="a", path=str(tmp_path / "adapter"))
    expected = told_by(load(directory, "cpu"), (adapter, None))
    assert told_by(load(directory, DEVICE), (adapter, None)) == expected
    assert expected != told_by(load(directory, "cpu"))


@pytest.mark.skipif(not (default_model_dir() / "model.safetensors").exists(), reason="not built")
@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_questions_are_answered_in_bfloat16(changes: dict[str, Any]) -> None:
    """As many as on a CPU (92 of 100), except for a few that rounding decides."""
    asked = read_questions(HELDOUT)[:100]
    changes = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**28, **changes}
    with LLM(default_model_dir(), device=DEVICE, use_tqdm=False, **changes) as llm:
        assert count_correct_answers(llm, asked) >= 85
