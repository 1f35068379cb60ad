"""The cost of adapters in a decode step: several in one batch, against the same rows without any.

    python -m loadtest.models 100m DIR
    python -m tools.bench.lora DIR
    python -m tools.bench.lora qwen3-0.6b --device cuda     # random weights in this shape

Random adapters cover all linear layers. The same sequences are continued with and without them, in
alternation. Reported are the median step times, and the median over the rounds of the throughput
with adapters relative to that without: the two halves of a round see the same conditions on a
shared machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.requests import fan_out
from engine.types import Adapter, SamplingParams
from tools.bench.shapes import CONFIGS, write_config

_PROMPT, _WARM_UP_STEPS, _ROUNDS = 64, 8, 5
_GATE = 0.7  # minimum share of the throughput without adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON. Returns 1 if the gate, which is one for CPUs, is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help=f"a directory in Hugging Face format, of a Llama; or {', '.join(CONFIGS)}"
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24, help="timed, of each round")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    length = _PROMPT + _WARM_UP_STEPS + options.steps + 8
    with tempfile.TemporaryDirectory() as home:
        model, is_shape = options.model, options.model in CONFIGS
        if is_shape:
            model = str(write_config(options.model, Path(home) / "model"))
        core = EngineCore.load(
            EngineConfig(
                model=model,
                device=options.device,
                load_format="dummy" if is_shape else "auto",
                max_model_len=length,
                scheduler=SchedulerConfig(max_num_seqs=options.rows, max_step_passes=1),
                cache=CacheConfig(
                    enable_prefix_caching=False, num_blocks=options.rows * (1 + -(-length // 16))
                ),
            )
        )
        spec = read_config(model).spec
        assert isinstance(spec, DecoderSpec)
        adapters = [
            _make(Path(home) / str(i), spec, options.rank, i) for i in range(options.adapters)
        ]
        result = measure(core, adapters, options.rows, options.steps)
    name = Path(options.model).name
    result |= {
        "case": f"{name} {options.rows} rows, {options.adapters} adapters",
        "adapters": options.adapters,
        "rank": options.rank,
        "model": name,
    }
    print(json.dumps(result))
    return 1 if options.device == "cpu" and result["throughput"] < _GATE else 0


def measure(core: EngineCore, adapters: Sequence[Adapter], rows: int, steps: int) -> dict[str, Any]:
    """Measure rounds without and with adapters, in alternation."""
    num_ids = min(1000, core.info.vocab_size - 3)
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}  # seconds of steps
    for number in range(2 * _ROUNDS):
        is_adapted = number % 4 in (1, 2)  # the order alternates from round to round
        ids: list[str] = []
        taken: list[float] = []
        for index in range(rows):
            prompt = [3 + (index * 131 + place * 7) % num_ids for place in range(_PROMPT)]
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            adapter = adapters[index % len(adapters)] if is_adapted else None
            (request,) = fan_out(f"{number}-{index}", prompt, sampling, adapter=adapter)
            core.add(request)
            ids.append(request.id)
        waiting = rows
        while waiting:
            waiting -= len(core.step().num_cached_tokens)  # reported with the first token
        while core.prepare():
            pass  # what a server captures behind its first answers
        for step in range(_WARM_UP_STEPS + steps):
            begun_s = time.perf_counter()
            core.step()
            if step >= _WARM_UP_STEPS:
                taken.append(time.perf_counter() - begun_s)
        rounds[is_adapted].append(taken)
        for id_ in ids:
            core.abort(id_)
        while core.has_work:
            core.step()
    plain_s, adapted_s = (
        statistics.median(itertools.chain(*rounds[adapted])) for adapted in (False, True)
    )
    shares = [
        statistics.median(plain) / statistics.median(adapted)
        for plain, adapted in zip(rounds[False], rounds[True], strict=True)
    ]
    return {
        "rows": rows,
        "time_ms": adapted_s * 1e3,  # of a step
        "plain_time_ms": plain_s * 1e3,
        "throughput": statistics.median(shares),
        "rounds": shares,
    }


def _make(directory: Path, spec: DecoderSpec, rank: int, seed: int) -> Adapter:
    """A random adapter of all linear layers of a Llama, in PEFT's format."""
    hidden, inner, query, kv = (
        *(spec.hidden_size, spec.intermediate_size),
        *(spec.query_size, spec.kv_size),
    )
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(spec.num_layers):
        for module, (outputs, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            down = torch.randn(rank, inputs, generator=random)
            up = torch.randn(outputs, rank, generator=random)
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down / 50, up / 50
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(id=directory.name, name=directory.name, path=str(directory))


if __name__ == "__main__":
    sys.exit(main())
