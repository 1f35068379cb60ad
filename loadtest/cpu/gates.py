"""Compares measurements with the targets: one verdict for each gate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.cpu.ceilings import Ceilings
from loadtest.cpu.loads import MAIN, OVERHEAD, PREFIX, CpuLoad
from loadtest.cpu.parts import PARTS, QUIRE
from loadtest.cpu.published import scaled_tokens_per_s


@dataclass(frozen=True)
class Verdict:
    """One gate. ``wanted`` is a minimum, or a maximum if ``at_most`` is set."""

    gate: str
    measured: float
    wanted: float
    unit: str
    against: str = ""  # what a ratio is relative to, and where that figure came from
    at_most: bool = False

    @property
    def passes(self) -> bool:
        """Whether the measured value meets the target."""
        if self.at_most:
            return self.measured <= self.wanted
        return self.measured >= self.wanted

    def row(self) -> tuple[str, ...]:
        """The cells of a table row."""
        sign = "<=" if self.at_most else ">="
        verdict = "pass" if self.passes else "MISS"
        wanted = f"{sign} {self.wanted:g} {self.unit}"
        return self.gate, f"{self.measured:,.2f} {self.unit}", wanted, self.against, verdict

    def as_dict(self) -> dict[str, Any]:
        """The verdict as a JSON object."""
        return {**asdict(self), "passes": self.passes}


@dataclass(frozen=True)
class _Ratio:
    part: str
    peer: str
    min_ratios: tuple[float, ...]  # the target at each of the loads
    loads: tuple[CpuLoad, ...] = MAIN


_RATIOS = (
    _Ratio("0.5b-bf16", "vllm bf16", (1.25, 1.1, 1.05)),
    _Ratio("0.5b-bf16", "vllm bf16", (1.0,), PREFIX),
    _Ratio("100m-bf16", "vllm bf16", (1.5, 1.2, 1.25)),
    _Ratio("0.5b-int8", "vllm w8a8", (1.2, 1.1, 1.05)),
    _Ratio("0.5b-int8", "vllm w8a8", (1.0,), PREFIX),
    _Ratio("0.5b-int8", "llama q4_0", (1.0,), MAIN[:1]),
    _Ratio("0.5b-int4", "llama q4_0", (1.0, 1.5, 1.5)),
    _Ratio("tiny-bf16", "vllm bf16", (2.0, 2.5), OVERHEAD[1:]),
)
_MIN_SHARE_OF_FLOOR = 0.85  # 0.5b in bf16, 16 in flight
_MIN_OVERHEAD_TOKENS_PER_S = 1000.0  # tiny, one in flight
_MAX_ITL_P99_MS = 350.0  # 0.5b, 16 in flight
_MAX_READY_S = 6.0
_MAX_FIRST_TOKEN_S = 4.0
_MAX_IDLE_PERCENT = 1.0
_MAX_PEAK_GB = {"0.5b-bf16": 1.6, "0.5b-int8": 1.0}


def evaluate_gates(result: Mapping[str, Any]) -> list[Verdict]:
    """A verdict for every gate that ``result`` has figures for."""
    parts = result["parts"]
    return [
        *(verdict for gate in _RATIOS for verdict in _ratio_verdicts(gate, parts)),
        *_floor_verdicts(parts),
        *(verdict for name, part in parts.items() for verdict in _server_verdicts(name, part)),
        *_start_verdicts(result),
    ]


def compare_to_peer(
    name: str, peer: str, load: CpuLoad, parts: Mapping[str, Any]
) -> tuple[float, float, str] | None:
    """Compare Quire with a peer in part ``name``.

    Returns Quire's rate over the peer's, the peer's output tokens/s, and the source of the peer's
    figure: rounds alternating with Quire's, the same peer in another part, or a scaled published
    figure.
    """
    own = _load_results(parts, name, load)
    if own is None:
        return None
    rate = own["sides"][QUIRE]["tokens_per_s"]
    if peer in own["sides"]:
        pairs = zip(own["sides"][QUIRE]["rounds"], own["sides"][peer]["rounds"], strict=True)
        ratio = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
        return ratio, own["sides"][peer]["tokens_per_s"], "in turn"
    model = PARTS[name].model
    for other in parts:
        sides = (_load_results(parts, other, load) or {}).get("sides", {})
        if PARTS[other].model == model and peer in sides:
            theirs = sides[peer]["tokens_per_s"]
            return rate / theirs, theirs, f"in part {other}"
    scaled = scaled_tokens_per_s(model, peer, load, Ceilings(**own["ceilings"]))
    if scaled is None:
        return None
    theirs, how = scaled
    return rate / theirs, theirs, how


def _ratio_verdicts(gate: _Ratio, parts: Mapping[str, Any]) -> Iterator[Verdict]:
    for load, least in zip(gate.loads, gate.min_ratios, strict=True):
        found = compare_to_peer(gate.part, gate.peer, load, parts)
        if found is not None:
            ratio, theirs, how = found
            against = f"{gate.peer}, {theirs:,.1f} tokens/s, {how}"
            yield Verdict(f"{gate.part} {load.key}", ratio, least, "x", against)


def _floor_verdicts(parts: Mapping[str, Any]) -> Iterator[Verdict]:
    own = _load_results(parts, "0.5b-bf16", MAIN[-1])
    if own is not None:
        floor = own["floor_tokens_per_s"]
        share = own["sides"][QUIRE]["tokens_per_s"] / floor
        gate = f"0.5b-bf16 {MAIN[-1].key}, share of the floor"
        yield Verdict(gate, share, _MIN_SHARE_OF_FLOOR, "", f"{floor:,.1f} tokens/s")
    own = _load_results(parts, "tiny-bf16", OVERHEAD[0])
    if own is not None:
        measured = own["sides"][QUIRE]["tokens_per_s"]
        gate = f"tiny-bf16 {OVERHEAD[0].key}"
        yield Verdict(gate, measured, _MIN_OVERHEAD_TOKENS_PER_S, "tokens/s")


def _load_results(parts: Mapping[str, Any], name: str, load: CpuLoad) -> dict[str, Any] | None:
    """The measurements of one load of a part, or None."""
    return parts.get(name, {}).get("loads", {}).get(load.key)


def _server_verdicts(name: str, part: Mapping[str, Any]) -> Iterator[Verdict]:
    if PARTS[name].model != "0.5b":
        return
    busy = part["loads"].get(MAIN[-1].key)
    if busy is not None:
        measured = busy["sides"][QUIRE]["itl_p99_ms"]
        yield Verdict(f"{name} ITL p99 at 16", measured, _MAX_ITL_P99_MS, "ms", at_most=True)
    server = part["servers"].get(QUIRE)
    if server is None:
        return  # the run was interrupted before the part was complete
    if name in _MAX_PEAK_GB:
        measured = server["peak_bytes"] / 1e9
        yield Verdict(f"{name} peak memory", measured, _MAX_PEAK_GB[name], "GB", at_most=True)
    yield Verdict(f"{name} ready", server["ready_s"], _MAX_READY_S, "s", at_most=True)
    idle = server["idle_cores"] * 100
    yield Verdict(f"{name} idle CPU", idle, _MAX_IDLE_PERCENT, "%", at_most=True)


def _start_verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    start = result.get("start")
    if start is not None:
        measured = start["median_s"]
        yield Verdict("first token after exec", measured, _MAX_FIRST_TOKEN_S, "s", at_most=True)
