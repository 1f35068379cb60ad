"""The engine on a pretended GPU, in whose steps the host must not wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.runner import load_runner, prompt_graphs
from engine.runner.graphs import DecodeGraphs
from engine.runner.model_runner import ModelRunner
from engine.runner.prompt_graphs import PromptGraphs
from engine.runner.protocol import LaunchedStep
from engine.types import Request, StepPlan
from tests.pretended_gpu.launches import Launches
from tests.pretended_gpu.stand_in import pretended_gpu
from tests.pretended_gpu.tensor import PretendedGpu

Texts = dict[str, list[object]]


class Rig(NamedTuple):
    """An engine and its device."""

    core: EngineCore
    gpu: PretendedGpu
    launches: Launches


def config_of(model: str, **changes: Any) -> EngineConfig:
    """The config of a tiny model on the pretended GPU, with few rows and blocks."""
    cache = {"block_size": 16, "num_blocks": 24, **changes.pop("cache", {})}
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 64, **changes.pop("scheduler", {})}
    given = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", **changes}
    return EngineConfig(
        model=model,
        num_threads=1,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**limits),
        **given,
    )


@contextmanager
def on_pretended_gpu(
    config: EngineConfig, eager: str = "none", prompt_sizes: tuple[int, ...] = (16,)
) -> Iterator[Rig]:
    """Run the engine of ``config`` with all of its graphs captured.

    Args:
        config: the engine's config.
        eager: see ``Queues``.
        prompt_sizes: numbers of tokens of steps with prompts to capture; interpreting large ones
            takes long.
    """
    with pretended_gpu(eager) as (gpu, launches), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_graphs, "_SIZES", prompt_sizes)
        runner = load_runner(config)
        assert isinstance(runner, ModelRunner)
        launch = runner.launch

        def without_waiting(plan: StepPlan) -> LaunchedStep:
            with gpu.step():
                return launch(plan)

        runner.launch = without_waiting
        core = EngineCore(config, runner)
        while runner.prepare():
            pass
        captured: list[object] = [runner._graphs]
        if (draft := runner._draft) is not None:
            captured += {draft._reading, draft._following}
        if runner._prompt_graphs is not None:
            captured.append(runner._prompt_graphs)
        for graphs in captured:
            assert isinstance(graphs, DecodeGraphs | PromptGraphs)
            ladder = graphs._ladder
            assert set(ladder._graphs) == set(ladder._kinds(adapted=False)), "one is not captured"
        yield Rig(core, gpu, launches)


def on_cpu(config: EngineConfig, requests: Sequence[Request]) -> Texts:
    """The reference: the same requests by plain torch, one step after the other."""
    scheduler = msgspec.structs.replace(config.scheduler, overlap=False, max_step_passes=1)
    cache = msgspec.structs.replace(config.cache, offload_bytes=0)
    config = msgspec.structs.replace(
        config,
        device="cpu",
        attention_backend="reference",
        batch_invariant=False,
        scheduler=scheduler,
        cache=cache,
    )
    return texts(EngineCore(config, load_runner(config)), requests)


def texts(core: EngineCore, requests: Sequence[Request]) -> Texts:
    """The output tokens of each request."""
    for request in requests:
        core.add(request)
    told: Texts = {}
    while core.has_work:
        output = core.step()
        assert not output.errors, output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            entries = output.logprobs.get(row_id)
            news = [(e.token_id, e.top_ids) for e in entries] if entries else tokens
            told.setdefault(row_id, []).extend(news)
    assert core.stats.blocks.held == 0
    return told
