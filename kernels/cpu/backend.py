"""The attention backend ``cpu``: blocks are read in place, by ``native/attention*.cpp``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.cpu.bindings import CODE, CODE_KINDS, COUNT, DTYPE_CODES, POINTER, function, pointer

_MAX_HEAD_DIM = 640  # as in native/attention.h


class _Batch(ctypes.Structure):
    """``Batch`` of native/attention.h."""

    _fields_ = (
        *((name, POINTER) for name in DeviceGeometry._fields if name != "ends"),
        ("rows", COUNT),
        ("table_width", COUNT),
        ("heads", COUNT),
        ("kv_heads", COUNT),
        ("head_dim", COUNT),
        ("value_dim", COUNT),
        ("block_size", COUNT),
        ("dtype", CODE),
    )


@dataclass(frozen=True, slots=True)
class CpuState:
    """A step's geometry in the kernels' form."""

    batch: _Batch
    geometry: BatchGeometry  # owns the tensors that ``batch`` points into


class CpuAttention:
    """Paged attention with float32 sums; a row's result does not depend on the others."""

    name = "cpu"
    is_capturable = True

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if spec.device.type != "cpu":
            return "the model is not on the CPU"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly"
        if spec.head_dim % 8 or spec.head_dim > _MAX_HEAD_DIM:
            return f"a head size of {spec.head_dim} is no multiple of 8 up to {_MAX_HEAD_DIM}"
        if spec.dtype not in DTYPE_CODES:
            return f"no kernel for {spec.dtype}"
        if spec.cache_dtype is not None and spec.cache_dtype not in CODE_KINDS:
            return f"no kernel for a cache of {spec.cache_dtype}"
        return None

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """Return whether the numbers of rows are equal: everything else is read anew each time."""
        return captured.num_rows == actual.num_rows

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> CpuState:
        """Collect the geometry's addresses; the kernel divides the work itself, in microseconds."""
        # This call makes torch apply its number of threads to the thread that runs the step.
        torch.get_num_threads()
        batch = _Batch(
            *(tensor.data_ptr() for tensor in geometry.device[:-1]),
            geometry.num_rows,
            geometry.device.tables.shape[1],
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim or spec.head_dim,
            spec.block_size,
            DTYPE_CODES[spec.dtype],
        )
        return CpuState(batch, geometry)

    def forward(
        self,
        state: CpuState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        query = query.contiguous()
        output = query.new_empty((*query.shape[:-1], cache.values.shape[-1]))
        arguments = (
            ctypes.byref(state.batch),
            layer.scale,
            layer.softcap or 0.0,
            layer.window or 0,
            layer.chunk_size or 0,
            pointer(layer.sinks),
            pointer(state.geometry.device.query_ends) if layer.is_bidirectional else None,
            pointer(layer.slopes),
            cache.block_stride_heads,
            query.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            output.data_ptr(),
        )
        if cache.key_scales is None:
            function("quire_attention")(*arguments)
        else:
            kind = CODE_KINDS[cache.keys.dtype]
            scales = (pointer(cache.key_scales), pointer(cache.value_scales))
            function("quire_attention_codes")(*arguments, kind, *scales)
        return output
