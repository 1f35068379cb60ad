"""Figures that peers reached on another machine, and their scaling to this one.

They were measured on two cores of an AMD EPYC (Zen 4) with the same models and loads. If a peer is
not installed here, its figure is multiplied by the ratio of the two machines' floors for that load.
The overhead load, which no ceiling bounds, is not scaled.
"""

from __future__ import annotations

from loadtest.cpu.ceilings import Ceilings
from loadtest.cpu.loads import MAIN, OVERHEAD, PREFIX, CpuLoad, floor_s
from loadtest.models import SHAPES

_PUBLISHED_CEILINGS = Ceilings(28.6e9, 415e9, 658e9)
_WEIGHT_BITS = {"vllm bf16": 16, "vllm w8a8": 8, "llama bf16": 16, "llama q8_0": 8, "llama q4_0": 4}

# Output tokens/s, by model and peer, at each concurrency of the load.
_MAIN = {
    ("0.5b", "vllm bf16"): (24.2, 65.7, 92.0),
    ("0.5b", "vllm w8a8"): (37.5, 92.8, 134.0),
    ("0.5b", "llama bf16"): (25.0, 37.4, 57.6),
    ("0.5b", "llama q8_0"): (27.7, 37.8, 46.3),
    ("0.5b", "llama q4_0"): (42.5, 50.9, 57.8),
    ("100m", "vllm bf16"): (66.0, 197.0, 320.0),
    ("100m", "llama bf16"): (92.0, 143.0, 228.0),
}
_OVERHEAD = {
    ("tiny", "vllm bf16"): (249.0, 2048.0, 2890.0),
    ("tiny", "llama bf16"): (805.0, 1126.0, 1292.0),
}
_PREFIX_S = {("0.5b", "vllm bf16"): 15.7, ("0.5b", "vllm w8a8"): 8.4, ("0.5b", "llama bf16"): 74.0}


def scaled_tokens_per_s(
    model: str, peer: str, load: CpuLoad, ceilings: Ceilings
) -> tuple[float, str] | None:
    """Output tokens/s of ``peer`` under ``load`` and a note on the scaling; None if unknown."""
    there = _figures().get((model, peer, load.key))
    if there is None:
        return None
    if load in OVERHEAD:
        return there, "figure of another machine"
    bits = _WEIGHT_BITS[peer]
    longer = floor_s(SHAPES[model], load, bits, _PUBLISHED_CEILINGS)
    ratio = longer / floor_s(SHAPES[model], load, bits, ceilings)
    return there * ratio, f"scaled {ratio:.2f}x"


def _figures() -> dict[tuple[str, str, str], float]:
    table = {
        (*which, load.key): figure
        for loads, rows in ((MAIN, _MAIN), (OVERHEAD, _OVERHEAD))
        for which, figures in rows.items()
        for load, figure in zip(loads, figures, strict=True)
    }
    (prefix,) = PREFIX
    for which, seconds in _PREFIX_S.items():
        table[(*which, prefix.key)] = prefix.output_tokens / seconds
    return table
