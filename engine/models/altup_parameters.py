"""The parameters of several residual streams; see ``engine/models/altup.py``."""

from __future__ import annotations

from engine.models.altup_spec import AltUpSpec
from engine.models.parameter import Parameter


def altup_parameters(spec: AltUpSpec, hidden: int) -> dict[str, Parameter]:
    """Return the parameters of both ends, by name."""
    others = spec.num_streams - 1
    leave = {f"altup.leave.{j + 1}.weight": Parameter((hidden,), (hidden,)) for j in range(others)}
    return {"altup.enter.weight": Parameter((hidden,) * others, (hidden,)), **leave}


def altup_layer_parameters(spec: AltUpSpec, hidden: int) -> dict[str, Parameter]:
    """Return the parameters of a layer, by name."""
    streams, rank = spec.num_streams, spec.laurel_rank
    return {
        "altup.router.weight": Parameter((streams,), (hidden,)),
        "altup.norm": Parameter((hidden,), is_norm=True),
        "altup.prediction.weight": Parameter((streams**2,), (streams,)),
        "altup.correction.weight": Parameter((streams,), (streams,)),
        "altup.scale": Parameter((hidden,), is_norm=True),
        "laurel.down.weight": Parameter((rank,), (hidden,)),
        "laurel.up.weight": Parameter((hidden,), (rank,)),
        "laurel.norm": Parameter((hidden,), is_norm=True),
    }
