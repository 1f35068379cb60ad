"""An engine with random weights in this process, and a driver for its requests."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from engine.config import CacheConfig, Device, EngineConfig, Quantization, SchedulerConfig
from engine.core import EngineCore
from engine.requests import fan_out
from engine.types import SamplingParams
from tools.bench.shapes import write_config

TINY = "tiny"
MAX_STEP_TOKENS = 8192
_TINY_CACHE_BYTES = 32 * 2**20


def parser(description: str | None, *models: str) -> argparse.ArgumentParser:
    """A parser with the options that all parts share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--model", default=models[0], choices=(*models, TINY), help="a shape; tiny for a test run")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--attention-backend", default="auto")
    add("--block-size", type=int, help="tokens; the engine's own choice when left out")
    return made


def load_core(
    options: argparse.Namespace,
    *,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    cache_bytes: int | None = None,
    num_layers: int | None = None,
    batch_invariant: bool = False,
    quantization: Quantization | None = None,
) -> EngineCore:
    """Load an engine by the options of :func:`parser`.

    The prefix cache is disabled, so that no prompt of a measurement is found in it. ``cache_bytes``
    is the size of the KV cache; None uses what the device has. ``num_layers`` are fewer than the
    model's, for what does not depend on them.

    Raises:
        ModelLoadError: the device has too little memory, or a backend rejects the shape.
    """
    is_tiny = options.model == TINY
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            model=str(write_config(options.model, Path(directory), num_layers)),
            dtype="bfloat16",
            device=cast("Device", options.device),
            load_format="dummy",
            max_model_len=None if is_tiny else max_model_len,
            attention_backend=options.attention_backend,
            batch_invariant=batch_invariant,
            quantization=quantization,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=MAX_STEP_TOKENS,
                max_step_passes=1,
            ),
            cache=CacheConfig(
                block_size=options.block_size,
                enable_prefix_caching=False,
                memory_bytes=_TINY_CACHE_BYTES if is_tiny else cache_bytes,
            ),
        )
        return EngineCore.load(config)


class Session:
    """Sends requests to an engine and counts the tokens it returns. Not thread-safe."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.num_tokens = 0  # returned by the engine so far, over all requests
        self._live: set[str] = set()
        self._num_submitted = 0

    @property
    def capacity_tokens(self) -> int:
        """The token slots of the KV cache."""
        memory = self.core.info.memory
        return memory.num_blocks * memory.block_size

    @property
    def is_busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def submit(self, prompt: Sequence[int], num_output: int) -> None:
        """Queue one greedy request of full length. Token ids wrap around in a small vocabulary."""
        self._num_submitted += 1
        vocab = self.core.info.vocab_size
        ids = [token % vocab for token in prompt]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        (request,) = fan_out(f"bench-{self._num_submitted}", ids, sampling)
        self.core.add(request)
        self._live.add(request.id)

    def step(self) -> int:
        """Run one step and return the number of tokens it produced.

        Raises:
            RuntimeError: a request failed.
        """
        output = self.core.step()
        if output.errors:
            raise RuntimeError(f"a request failed: {next(iter(output.errors.values()))}")
        for request_id, reason in zip(output.ids, output.finish_reasons, strict=True):
            if reason is not None:
                self._live.discard(request_id)
        num_tokens = sum(map(len, output.token_ids))
        self.num_tokens += num_tokens
        return num_tokens

    def prepare(self) -> None:
        """Capture now what would be captured after the first answers. Call it after one answer."""
        while self.core.prepare():
            pass

    def finish(self) -> None:
        """Step until every request has ended."""
        while self.is_busy:
            self.step()

    def abort(self) -> None:
        """Abort every request."""
        for request_id in self._live:
            self.core.abort(request_id)
        self.finish()


@contextmanager
def timed(device: str) -> Iterator[list[float]]:
    """Time a block, including the device's work, into the list that is yielded (seconds)."""
    taken: list[float] = []
    _wait(device)
    begun_s = time.perf_counter()
    yield taken
    _wait(device)
    taken.append(time.perf_counter() - begun_s)


def print_row(row: dict[str, Any]) -> None:
    """Print one result as a line of JSON, immediately, so that it survives a time limit."""
    print(json.dumps(row), flush=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
