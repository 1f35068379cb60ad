"""The parameters of layers with a recurrent state; see ``engine/models/recurrent.py``."""

from __future__ import annotations

from engine.models.parameter import Parameter
from engine.models.recurrence import (
    ChannelScanSpec,
    GatedDeltaSpec,
    MambaSpec,
    RecurrenceSpec,
    ShortConvSpec,
)


def recurrent_parameters(spec: RecurrenceSpec, hidden: int) -> dict[str, Parameter]:
    """The parameters of a recurrence; see ``engine/models/recurrent.py``."""
    if isinstance(spec, ShortConvSpec):
        own = _short_conv(spec, hidden)
    elif isinstance(spec, MambaSpec):
        own = _mamba(spec, hidden)
    elif isinstance(spec, ChannelScanSpec):
        own = _channel_scan(spec, hidden)
    else:
        own = _gated_delta(spec, hidden)
    return {f"recurrent.{name}": parameter for name, parameter in own.items()}


def _short_conv(spec: ShortConvSpec, hidden: int) -> dict[str, Parameter]:
    channels = spec.channels
    fused = (channels,) * 3
    found = {
        "input.weight": Parameter((3 * channels,), (hidden,), runs=(fused,)),
        "conv.weight": Parameter((channels,), (spec.conv_width,)),
        "output.weight": Parameter((hidden,), (channels,)),
    }
    if spec.bias:
        found["input.bias"] = Parameter((3 * channels,), runs=(fused,))
        found["conv.bias"] = Parameter((channels,))
        found["output.bias"] = Parameter((hidden,))
    return found


def _gated_delta(spec: GatedDeltaSpec, hidden: int) -> dict[str, Parameter]:
    heads, values = spec.num_value_heads, spec.value_size
    mixed = spec.conv_sizes if spec.separate_projections else (spec.channels,)
    runs = () if spec.separate_projections else (spec.conv_sizes,)
    fused_runs = (*runs, (values,)) if runs else ()
    if spec.channel_rank:
        return _channel_delta(spec, hidden)
    decays = spec.conv_sizes[1] if spec.decays_channels else heads
    return {
        "input.weight": Parameter((*mixed, values), (hidden,), runs=fused_runs),
        "gates.weight": Parameter((heads, decays), (hidden,)),
        "conv.weight": Parameter(mixed, (spec.conv_width,), runs=runs),
        "log_a": Parameter((heads,), is_float32=True),
        "dt_bias": Parameter((decays,), is_float32=True),
        "norm": Parameter((spec.value_dim,), is_norm=True),
        "output.weight": Parameter((hidden,), (values,)),
    }


def _channel_delta(spec: GatedDeltaSpec, hidden: int) -> dict[str, Parameter]:
    heads, decays, rank = spec.num_value_heads, spec.conv_sizes[1], spec.channel_rank
    return {
        "input.weight": Parameter(spec.conv_sizes, (hidden,)),
        "gates.weight": Parameter((heads,), (hidden,)),
        "ranked.weight": Parameter((rank, rank), (hidden,)),
        "decays.weight": Parameter((decays,), (rank,)),
        "output_gates.weight": Parameter((spec.value_size,), (rank,)),
        "conv.weight": Parameter(spec.conv_sizes, (spec.conv_width,)),
        "log_a": Parameter((heads,), is_float32=True),
        "dt_bias": Parameter((decays,), is_float32=True),
        "norm": Parameter((spec.value_dim,), is_norm=True),
        "output.weight": Parameter((hidden,), (spec.value_size,)),
    }


def _mamba(spec: MambaSpec, hidden: int) -> dict[str, Parameter]:
    heads, inner, projected = spec.num_heads, spec.inner_size, spec.projected_size
    mixed = spec.conv_sizes
    fused = ((inner, *mixed, heads),)
    found = {
        "input.weight": Parameter((projected,), (hidden,), runs=fused),
        "conv.weight": Parameter((spec.channels,), (spec.conv_width,), runs=(mixed,)),
        "log_a": Parameter((heads,), is_float32=True),
        "dt_bias": Parameter((heads,), is_float32=True),
        "skip": Parameter((heads,), is_float32=True),
        "output.weight": Parameter((hidden,), (inner,)),
    }
    if spec.has_norm:
        found["norm"] = Parameter((inner,), is_norm=True)
    if spec.conv_bias:
        found["conv.bias"] = Parameter((spec.channels,), runs=(mixed,))
    if spec.bias:
        found["input.bias"] = Parameter((projected,), runs=fused)
        found["output.bias"] = Parameter((hidden,))
    return found


def _channel_scan(spec: ChannelScanSpec, hidden: int) -> dict[str, Parameter]:
    channels, rank, size = spec.channels, spec.step_rank, spec.state_size
    fused = ((channels, channels),)
    found = {
        "input.weight": Parameter((2 * channels,), (hidden,), runs=fused),
        "conv.weight": Parameter((channels,), (spec.conv_width,)),
        "shared.weight": Parameter((spec.shared_size,), (channels,)),
        "steps.weight": Parameter((channels,), (rank,)),
        "steps.bias": Parameter((channels,)),
        "log_a": Parameter((channels,), (size,), is_float32=True),
        "skip": Parameter((channels,), is_float32=True),
        "output.weight": Parameter((hidden,), (channels,)),
    }
    if spec.norms != "none":
        for name, width in (("step_norm", rank), ("write_norm", size), ("read_norm", size)):
            found[name] = Parameter((width,), is_norm=True, is_one=spec.norms == "weightless")
    if spec.conv_bias:
        found["conv.bias"] = Parameter((channels,))
    if spec.bias:
        found["input.bias"] = Parameter((2 * channels,), runs=fused)
        found["output.bias"] = Parameter((hidden,))
    return found
