"""Turns a checkpoint into a quantised one.

    for each layer:   stream ─► observed layer         the inputs of its linear layers
                      fold, clip, round                 its codes, written at once
                      stream ─► rounded layer ─► next   so later layers are rounded for the inputs
                                                        that they will really get

The held-out windows go through both the original and the rounded model. This gives the divergence
of the streams and both perplexities, without the whole model ever being in memory.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.client import LoadProgress
from tools.quantize.activations import ActivationFiles
from tools.quantize.compressed import quantization_config
from tools.quantize.files import read_part, write_shards, write_tensors
from tools.quantize.layer_runner import LayerRunner
from tools.quantize.layers import LayerQuantiser, layer_report, stream_error
from tools.quantize.recipe import QuantizeError, Recipe
from tools.quantize.report import Report, write_card, write_report
from tools.quantize.source import Source, digest
from tools.quantize.texts import Windows
from tools.quantize.workspace import Workspace

_SHARD_BYTES = 5 * 10**9
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# calibration: through rounded layers. exact and rounded: the held-out windows, through both.
_STREAMS = ("calibration", "exact", "rounded")


@dataclass(frozen=True, slots=True)
class Job:
    """The source, the output and how to produce it."""

    source: Path
    output: Path
    recipe: Recipe


def quantise(job: Job, windows: Windows, on_progress: LoadProgress | None = None) -> Report:
    """Create the quantised checkpoint; resumes an interrupted run of the same job.

    Args:
        job: what to create.
        windows: token ids of the calibration text, and of the held-out text.
        on_progress: called with the progress.

    Returns:
        The measurements, which are also written beside the weights.

    Raises:
        QuantizeError: the job is impossible; nothing has been written then.
        ModelLoadError: the checkpoint is missing, damaged or not supported.
        OSError: the disk is full, or not writable.
    """
    return _Run(job, windows, on_progress)()


class _Run:
    def __init__(self, job: Job, windows: Windows, on_progress: LoadProgress | None) -> None:
        self._started_s = time.monotonic()
        self._job = job
        self._windows = windows
        self._report_progress = on_progress or (lambda fraction, what: None)
        if job.output.resolve().is_relative_to(job.source.resolve()):
            raise QuantizeError(f"{job.output} lies within the model that is read")
        source = self._source = Source(job.source)
        self._check_windows()
        all_sites = [
            site for i in range(source.spec.num_layers) for site in source.sites(i, job.recipe)
        ]
        if not all_sites:
            raise QuantizeError("--ignore leaves nothing to quantise")
        stored = source.tensors_of(all_sites[0])[0].entry.dtype
        self._grid = job.recipe.make_grid(all_sites, stored)
        self._layers = LayerQuantiser(source, job.recipe, self._grid)
        self._space = Workspace(job.output, self._description())
        window = windows.calibration.shape[1]
        self._layer_runner = LayerRunner(source.spec, window)
        shape = (window, source.spec.hidden_size)
        counts = (len(windows.calibration), len(windows.held_out), len(windows.held_out))
        self._streams = ActivationFiles(
            self._space.streams,
            {name: (count, *shape) for name, count in zip(_STREAMS, counts, strict=True)},
            self._layer_runner.batch,
        )

    def __call__(self) -> Report:
        with torch.no_grad():  # not inference_mode: other threads fill in weights
            first = self._space.num_done
            if first == 0 or not self._streams.exist(first):
                first = self._begin()
            for i in range(first, self._num_layers):
                self._process_layer(i)
            before, after = self._perplexities()
        return self._finish(before, after)

    @property
    def _num_layers(self) -> int:
        return self._source.spec.num_layers

    def _begin(self) -> int:
        """Embed all windows."""
        self._report_progress(0.0, "embedding the calibration text")
        self._space.reports.clear()
        self._space.start()
        held_out = self._windows.held_out
        weights = {
            name: self._source.weights[name]
            for name in ("embedding", "positions", "embedding_norm", "embedding_norm.bias")
            if name in self._source.parameters
        }
        for name, tokens in zip(
            _STREAMS, (self._windows.calibration, held_out, held_out), strict=True
        ):
            batches = tokens.split(self._layer_runner.batch)
            self._streams.write(
                name, 0, (self._layer_runner.embed(ids, weights) for ids in batches)
            )
        return 0

    def _process_layer(self, i: int) -> None:
        """Observe, round and write one layer, and advance the streams past it."""
        layers = self._layers
        self._report_layer_progress(i, 0.0, "reading")
        weights = layers.read(i)
        whole = layers.build_layer(i, weights)
        observed, stats = layers.observe(i, whole)
        self._report_layer_progress(i, 0.1, "watching its inputs")
        for x in self._streams.read("calibration", i):
            self._layer_runner.run(observed, i, x)
        self._streams.write("exact", i + 1, self._run_layer(whole, i, "exact"))
        del whole, observed
        self._report_layer_progress(i, 0.4, "rounding")
        rounded = layers.quantise_layer(i, weights, stats)
        write_tensors(self._space.part(i), layers.tensors(i, rounded))
        self._report_layer_progress(i, 0.8, "going on")
        layer = layers.with_quantised_inputs(layers.build_layer(i, rounded.weights))
        for name in ("calibration", "rounded"):
            self._streams.write(name, i + 1, self._run_layer(layer, i, name))
        self._space.commit(layer_report(i, rounded, self._relative_divergence(i + 1)))
        self._streams.drop(i)

    def _run_layer(self, layer: Any, i: int, name: str) -> Iterator[torch.Tensor]:
        return (self._layer_runner.run(layer, i, x) for x in self._streams.read(name, i))

    def _relative_divergence(self, layer: int) -> float | None:
        """The relative divergence of the held-out streams before ``layer``."""
        pairs = zip(
            self._streams.read("exact", layer), self._streams.read("rounded", layer), strict=True
        )
        sums = [stream_error(exact, rounded) for exact, rounded in pairs]
        whole = sum(square for _, square in sums)
        return sum(error for error, _ in sums) / whole if whole else None

    def _perplexities(self) -> tuple[float | None, float | None]:
        """The perplexities of the held-out windows, before and after."""
        spec, held_out = self._source.spec, self._windows.held_out
        if not len(held_out) or not spec.is_generative or held_out.shape[1] < 2:
            return None, None
        self._report_progress(0.98, "judging the held-out text")
        head = "embedding" if spec.tie_word_embeddings else "head"
        read = ("norm", "norm.bias", head, "head.bias")
        names = [name for name in read if name in self._source.parameters]
        weights = {name: self._source.weights[name] for name in names}

        def perplexity(name: str) -> float:
            batches = held_out.split(self._layer_runner.batch)
            streams = self._streams.read(name, self._num_layers)
            losses = [
                self._layer_runner.losses(x, ids, weights)
                for x, ids in zip(streams, batches, strict=True)
            ]
            return math.exp(min(float(torch.cat(losses).mean()), 700.0))

        return perplexity("exact"), perplexity("rounded")

    def _finish(self, before: float | None, after: float | None) -> Report:
        """Assemble the result and move it to its place."""
        self._report_progress(0.99, "writing the model")
        space, source = self._space, self._source
        shutil.rmtree(space.model, ignore_errors=True)
        _copy_others(source.directory, space.model)
        parts = [
            source.tensors_outside_layers(),
            *(read_part(space.part(i)) for i in range(self._num_layers)),
        ]
        num_bytes = write_shards(space.model, parts, _SHARD_BYTES)
        config = dict(source.config)
        ignored = source.ignored(self._job.recipe)
        config["quantization_config"] = quantization_config(self._job.recipe, self._grid, ignored)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (space.model / "config.json").write_text(text, "utf-8")
        report = Report(
            source=source.directory.name,
            recipe={**asdict(self._job.recipe), "group_size": self._grid.group_size or -1},
            layers=space.reports,
            num_windows=len(self._windows.calibration),
            window=self._windows.calibration.shape[1],
            perplexity_before=before,
            perplexity_after=after,
            bytes_before=source.num_bytes,
            bytes_after=num_bytes,
            peak_memory_bytes=_peak_bytes(),
            took_s=time.monotonic() - self._started_s,
        )
        write_report(space.model, report)
        write_card(space.model, report)
        space.finish()
        self._report_progress(1.0, "done")
        return report

    def _check_windows(self) -> None:
        spec, windows = self._source.spec, self._windows
        if windows.calibration.shape[1] > spec.max_context_len:
            raise QuantizeError(
                f"a window of {windows.calibration.shape[1]} tokens is longer than the model's "
                f"context of {spec.max_context_len}"
            )
        indexer = None if spec.latent is None else spec.latent.indexer
        is_shared = any(layer.shares_selection for layer in spec.layers)
        if indexer is not None and is_shared and windows.calibration.shape[1] > indexer.top_k:
            raise QuantizeError(
                f"a window of {windows.calibration.shape[1]} tokens is longer than the "
                f"{indexer.top_k} that are selected, and layers, which are rounded one at a time, "
                "share selections"
            )
        for tokens in windows:
            if tokens.numel() and int(tokens.max()) >= spec.vocab_size:
                raise QuantizeError(
                    f"the tokenizer gives token {int(tokens.max())}, and the model has "
                    f"{spec.vocab_size}"
                )

    def _description(self) -> dict[str, Any]:
        """What a run must have in common with the one that it resumes."""
        data = (tokens.numpy().tobytes().hex() for tokens in self._windows)
        return {
            "model": self._source.fingerprint,
            "calibration text": digest(*data),
            **asdict(self._job.recipe),
        }

    def _report_layer_progress(self, i: int, share: float, what: str) -> None:
        self._report_progress(0.98 * (i + share) / self._num_layers, f"layer {i + 1}: {what}")


def _copy_others(source: Path, target: Path) -> None:
    """Copy tokenizer, templates and card: everything but weights, config.json and hidden files."""
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_dir() or any(part.startswith(".") for part in relative.parts):
            continue
        if path.name.endswith((*_WEIGHT_SUFFIXES, ".index.json")) or str(relative) == "config.json":
            continue
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)


def _peak_bytes() -> int:
    """The peak memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
