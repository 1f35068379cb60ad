"""Tensors that report a GPU as their device, and torch's operations on them.

Each stands for host memory, where its operations are done by the streams of ``queues.py``. So
results are right if, and only if, their readers waited for them. The shapes of results are known at
once, as on a GPU. Freed memory is overwritten once its stream gets there, as its next owner would
overwrite it.

The following raise a ``Violation``:

- operations on tensors of both devices, except for zero-dimensional numbers;
- in a *step*, everything that makes the host wait: reading a value, shapes that depend on values,
  copies from memory that is not page-locked, and copies that are not asynchronous;
- during the capture of a graph, everything that a capture does not allow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tests.pretended_gpu.queues import Queues, Stream, Violation

DEVICE = torch.device("cuda", 0)
_CPU, _META = torch.device("cpu"), torch.device("meta")

aten = torch.ops.aten
# Operations that return a value to the host, or whose shapes depend on values.
_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.equal,
    aten.repeat_interleave,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
_INDEXED = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


class DeviceStorage:
    """``torch.UntypedStorage`` of the device, as far as sleeping weights need it."""

    device = DEVICE

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def data_ptr(self) -> int:
        """Its address, which is unique."""
        return self._memory.held.data_ptr()

    def nbytes(self) -> int:
        """Its size; 0 while its memory is freed."""
        return 0 if self._memory.is_empty else self._memory.held.untyped_storage().nbytes()

    def resize_(self, num_bytes: int) -> None:
        """Free its memory, or allocate as much again; in either case the content is lost."""
        held = self._memory.held
        assert num_bytes in (0, held.untyped_storage().nbytes())
        self._memory.wait("resizes a storage")
        self._memory.is_empty = not num_bytes
        poison(held)

    def copy_(self, source: torch.UntypedStorage) -> None:
        """Copy from the host."""
        self._memory.wait("copies a storage")
        assert not self._memory.is_empty
        self._memory.held.untyped_storage().copy_(source)

    def copy_to(self, target: torch.UntypedStorage) -> None:
        """Copy it to the host."""
        self._memory.wait("copies a storage")
        assert not self._memory.is_empty
        target.copy_(self._memory.held.untyped_storage())


class Memory:
    """The memory of a tensor and its views.

    Args:
        gpu: the device.
        held: the host tensor behind it.
    """

    __slots__ = ("_gpu", "_stream", "held", "is_empty", "users")

    def __init__(self, gpu: PretendedGpu, held: torch.Tensor) -> None:
        self._gpu = gpu
        self.held = held
        self.is_empty = False  # whether its storage has been resized to nothing
        self._stream = gpu.queues.current
        self.users: set[Stream] = set()  # from ``record_stream``
        if gpu.queues.capture is not None:
            gpu.pool.append(held)

    def wait(self, why: str) -> None:
        """Wait on the host for all work on this memory."""
        self._gpu.queues.refuse_wait(why)
        self._gpu.queues.wait_for_all(why)

    def __del__(self) -> None:
        """Overwrite the memory once its stream gets there, as its next owner would.

        Memory used on other streams (``record_stream``) is freed only after they are done, at a
        time that nothing can rely on: it is left as it is.
        """
        held = self.held
        is_pooled = any(held is each for each in self._gpu.pool)
        if self._gpu.is_on and not self.users and not is_pooled and self._gpu._is_done([held]):
            self._stream.append(lambda: poison(held))


def poison(held: torch.Tensor) -> None:
    """Fill memory with values that nothing should read."""
    if held.dtype.is_floating_point and held.dtype.itemsize > 1:
        held.fill_(float("nan"))
    else:
        held.view(torch.uint8).fill_(0) if held.dtype.itemsize == 1 else held.fill_(1)


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``inner`` is the host's, with the same shape and strides."""

    inner: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory) -> DeviceTensor:
        with torch.inference_mode(mode=False):  # views need a version counter
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        made.inner, made.memory = inner, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> Any:
        raise Violation(f"{func}: the device is gone")

    def untyped_storage(self) -> DeviceStorage:
        """See ``torch.Tensor``."""
        return DeviceStorage(self.memory)

    def record_stream(self, s: Stream) -> None:
        """See ``torch.Tensor``."""
        self.memory.users.add(s)

    def tolist(self) -> Any:
        """See ``torch.Tensor``."""
        return self.cpu().tolist()

    def numpy(self, **_: object) -> Any:
        """See ``torch.Tensor``."""
        raise TypeError("a tensor of a GPU is no array of numpy")

    def __repr__(self, **_: object) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"


class PretendedGpu(TorchDispatchMode):
    """The pretended GPU.

    Args:
        eager: see ``Queues``.
        largest: the most numbers of a tensor whose memory is used; operations with larger ones are
            not done. They take address space alone, so that models of any size fit.
    """

    def __init__(self, eager: str = "none", largest: int = sys.maxsize) -> None:
        super().__init__()
        self.queues = Queues(eager)
        self._largest = largest
        self.is_on = False
        self.pool: list[torch.Tensor] = []  # memory of captured graphs
        self.recorded_for: set[object] = set()  # memory pools of captures in progress
        self._locked: dict[int, object] = {}  # addresses of page-locked host memory

    @contextmanager
    def plugged_in(self) -> Iterator[Self]:
        """Allow tensors on the device; queued work is finished at the end."""
        _have_guard()
        self.is_on = True
        try:
            with _Functions(), self:
                yield self
                self.queues.wait_for_all("ends")
        finally:
            self.is_on = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Forbid anything that makes the host wait."""
        self.queues.in_step = True
        try:
            yield
        finally:
            self.queues.in_step = False

    def end_recording(self, device: int, pool: object) -> None:
        """``torch._C._cuda_endAllocateToPool``."""
        if pool not in self.recorded_for:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded_for.remove(pool)

    # ------------------------------------------------------------ the host's page-locked memory

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-lock the memory of a host tensor."""
        storage = tensor.untyped_storage()
        self._locked[storage.data_ptr()] = storage  # kept alive, so that its address is not reused
        return tensor

    def lock_address(self, address: int) -> None:
        """``cudaHostRegister``."""
        if address in self._locked:
            raise RuntimeError("this memory is locked already")
        self._locked[address] = None

    def unlock_address(self, address: int) -> None:
        """``cudaHostUnregister``."""
        del self._locked[address]

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in page-locked memory."""
        return tensor.untyped_storage().data_ptr() in self._locked

    # ------------------------------------------------------------ operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        device = kwargs.get("device")
        is_ours = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if not is_ours and (device is None or device.type != "cuda"):
            return self._on_host(func, args, kwargs)
        with self, torch._C.DisableTorchFunction():
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            return self._copy(packet, args, kwargs)
        self._refuse_mixture(func, tensors, is_ours=is_ours)
        if torch.Tag.inplace_view in func.tags and packet is not aten.detach_:
            raise NotImplementedError(f"{func} of a pretended GPU")
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
            return _view(func, args, kwargs)
        if kwargs.get("output_size") is None and (
            packet in _READS or (packet in _INDEXED and _has_mask(args))
        ):
            self.queues.refuse_wait(str(func))
            self.queues.wait_for_all("reads")
            return self._wrapped(func(*_inner(args), **_inner(kwargs)))
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            inner_args, inner_kwargs = _inner(args), _inner(kwargs)
            if self._is_done(tensors):
                self.queues.do(lambda: func(*inner_args, **inner_kwargs))
            return kwargs.get("out", args[0]) if returns else None
        return self._compute(func, args, kwargs)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        packet = func.overloadpacket
        if packet is aten.is_pinned:
            return self.is_locked(args[0])
        if packet in (aten._pin_memory, aten.pin_memory):
            return self.lock(args[0].clone(memory_format=torch.contiguous_format))
        if kwargs.get("pin_memory"):
            return self.lock(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _refuse_mixture(self, func: Any, tensors: Iterable[torch.Tensor], *, is_ours: bool) -> None:
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if not is_ours or not strangers:
            return
        if func.overloadpacket in _INDEXED:  # indices are copied, which waits
            self.queues.refuse_wait(f"{func} is given {len(strangers)} tensor(s) of the host")
        elif any(tensor.dim() for tensor in strangers):
            raise Violation(f"{func} is given tensors of the host and of the device")

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Allocate the results, and queue the work that fills them."""
        with torch.inference_mode():
            shapes = func(*_meta(args), **_meta(kwargs))
        made = tree_map_only(torch.Tensor, self.empty_like, shapes)
        if "empty" in func.overloadpacket.__name__:
            return made
        targets = [tensor.inner for tensor in tree_flatten(made)[0]]
        inner_args, inner_kwargs = _inner(args), _inner(kwargs)

        def fill() -> None:
            results = tree_flatten(func(*inner_args, **inner_kwargs))[0]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        if self._is_done([*targets, *tree_flatten((inner_args, inner_kwargs))[0]]):
            self.queues.do(fill)
        return made

    def _is_done(self, values: Iterable[Any]) -> bool:
        """Whether an operation on these is done at all."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return all(tensor.numel() <= self._largest for tensor in tensors)

    def _copy(self, packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        if packet is aten._to_copy:
            source, device = args[0], kwargs.get("device") or args[0].device
            dtype = kwargs.get("dtype") or source.dtype
            non_blocking = bool(kwargs.get("non_blocking"))
            is_there = device.type == "cuda"
            target = torch.empty_like(_shape_of(source), dtype=dtype)
            target = self.empty_like(target) if is_there else torch.empty_like(target, device=_CPU)
        else:
            target, source = args[:2]
            non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        to, from_ = (
            side.inner if isinstance(side, DeviceTensor) else side for side in (target, source)
        )
        if not self._is_done([to, from_]):
            return target
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            self.queues.do(lambda: to.copy_(from_))
            return target
        self.queues.refuse_in_capture("copies from or to its own memory")
        host = source if isinstance(target, DeviceTensor) else target
        is_plain = source.dtype == target.dtype and source.shape == target.shape
        if non_blocking and is_plain and host.is_contiguous() and self.is_locked(host):
            self.queues.do(lambda: to.copy_(from_))
            return target
        sides = f"from {source.device} to {target.device}"
        self.queues.refuse_wait(f"copies {list(source.shape)} {sides}")
        if isinstance(target, DeviceTensor):
            taken = from_.clone()
            self.queues.do(lambda: to.copy_(taken))
        else:
            self.queues.wait_for_all("reads")
            to.copy_(from_)
        return target

    def empty_like(self, shape: torch.Tensor) -> DeviceTensor:
        """Uninitialised memory with this shape and these strides."""
        held = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        if self._is_done([held]):
            poison(held)
        return DeviceTensor(held, Memory(self, held))

    def _wrapped(self, results: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda r: DeviceTensor(r, Memory(self, r)), results)


class _Functions(TorchFunctionMode):
    """``torch.tensor(list, device=...)`` copies in a way that dispatched operations do not see."""

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            device = torch.device(device)
            if device.type == "cuda" and not isinstance(args[0], torch.Tensor):
                return func(*args, **{**kwargs, "device": _CPU}).to(DEVICE)
        if func is torch.Tensor.to and args[1:] and args[1] == "cuda":
            return func(args[0], DEVICE, *args[2:], **kwargs)
        return func(*args, **kwargs)


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view: no computation, just the same view of the host tensor."""
    memory = args[0].memory
    seen = func(*_inner(args), **_inner(kwargs))
    return tree_map_only(torch.Tensor, lambda view: DeviceTensor(view, memory), seen)


def _has_mask(args: Sequence[Any]) -> bool:
    """Whether an index is a mask: the result's size depends on its values."""
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _inner(values: Any) -> Any:
    values = tree_map_only(DeviceTensor, lambda tensor: tensor.inner, values)
    return _placed(values, _CPU)


def _meta(values: Any) -> Any:
    return _placed(tree_map_only(torch.Tensor, _shape_of, values), _META)


def _placed(values: Any, device: torch.device) -> Any:
    if isinstance(values, dict):
        values = {name: device if name == "device" else v for name, v in values.items()}
        return {name: False if name == "pin_memory" else v for name, v in values.items()}
    return values


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _have_guard() -> None:
    """Let torch's C++ code switch to the device, which has as little effect as for ``meta``."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, _GUARDS)
    guards[1] = guards[14]  # DeviceType::CUDA, DeviceType::Meta
