"""The costs and gains of a quantisation, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPORT = "quantization_report.json"
_CARD = """\
## Quantised

The linear layers of this copy were quantised by `quire quantize` ({recipe}). The text above
describes the original model.

```
{table}
```
"""
# transformers creates the layers on the meta device first, and compressed-tensors (0.20) then
# forgets that zero points are stored packed: those of the file seem to have the wrong shape.
_ZERO_POINTS = """
transformers can load weights with zero points if it dequantises them:
`from_pretrained(..., quantization_config=CompressedTensorsConfig(dequantize=True))`.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements.

    Attributes:
        layers: for each layer, ``linear_errors`` (of each linear layer's output on the calibration
            text, as a share of its mean square) and ``stream_error`` (of the residual stream of
            the held-out text after it, against the unquantised model's).
        perplexity_before, perplexity_after: of the held-out text; None if there was none.
        accuracy: on questions, if there were any; see ``questions``.
    """

    source: str
    recipe: dict[str, Any]
    layers: list[dict[str, Any]]
    num_windows: int
    window: int
    perplexity_before: float | None
    perplexity_after: float | None
    bytes_before: int
    bytes_after: int
    peak_memory_bytes: int
    took_s: float
    accuracy: dict[str, Any] | None = None


def write_report(directory: Path, report: Report) -> None:
    """Write the report beside the weights."""
    text = json.dumps(asdict(report), indent=2) + "\n"
    (directory / REPORT).write_text(text, "utf-8")


def write_card(directory: Path, report: Report) -> None:
    """Add a section on the quantisation to the model card."""
    path = directory / "README.md"
    card = path.read_text("utf-8").rstrip() + "\n\n" if path.is_file() else ""
    section = _CARD.format(recipe=_recipe(report), table=format_report(report))
    if not report.recipe["symmetric"]:
        section += _ZERO_POINTS
    path.write_text(card + section, "utf-8")


def format_report(report: Report) -> str:
    """The table printed at the end of a run."""
    lines = [
        _row("layer", "linear layers", "worst", "residual stream"),
        *(_layer_row(layer) for layer in report.layers),
        "",
        f"size         {_mb(report.bytes_before)} -> {_mb(report.bytes_after)}",
    ]
    if report.perplexity_before is not None and report.perplexity_after is not None:
        lines.append(
            f"perplexity   {report.perplexity_before:.4f} -> {report.perplexity_after:.4f}"
        )
    if report.accuracy is not None:
        before, after = report.accuracy["right_before"], report.accuracy["right_after"]
        lines.append(f"questions    {before} -> {after} right, of {report.accuracy['total']}")
    lines.append(f"memory       {_mb(report.peak_memory_bytes)} at most, {report.took_s:.0f} s")
    return "\n".join(lines)


def _recipe(report: Report) -> str:
    recipe = report.recipe
    size = recipe["group_size"]
    shared = "one scale an output" if size == -1 else f"groups of {size} inputs"
    zeros = "" if recipe["symmetric"] else ", with zero points"
    return f"{recipe['scheme']}, {recipe['algorithm']}, {shared}{zeros}"


def _layer_row(layer: dict[str, Any]) -> str:
    errors: dict[str, float] = layer["linear_errors"]
    if not errors:
        return _row(str(layer["layer"]), "as it was", "", _share(layer["stream_error"]))
    mean = sum(errors.values()) / len(errors)
    worst = max(errors, key=lambda name: errors[name])
    stream = _share(layer["stream_error"])
    return _row(str(layer["layer"]), _share(mean), f"{worst} {_share(errors[worst])}", stream)


def _row(layer: str, mean: str, worst: str, stream: str) -> str:
    return f"{layer:<6} {mean:>14}   {worst:<28} {stream:>15}".rstrip()


def _share(error: float | None) -> str:
    return "" if error is None else f"{error:.2e}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
