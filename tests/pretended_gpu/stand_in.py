"""``torch.cuda`` on the pretended device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.triton import launch as launcher
from tests.pretended_gpu.launches import Launches
from tests.pretended_gpu.queues import Event, Stream, Violation, Work
from tests.pretended_gpu.tensor import DeviceStorage, PretendedGpu, poison
from tests.program_order import run_last_programs_first

TOTAL_BYTES = 2**30


class Graph:
    """``torch.cuda.CUDAGraph``: repeats the work queued during capture, in the same memory."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self._work: list[Work] | None = None
        self._pool: list[torch.Tensor] = []

    def replay(self) -> None:
        """Queue the captured work. Other graphs may have overwritten memory that it only reads."""
        self._gpu.queues.refuse_in_capture("replays a graph")
        assert self._work is not None
        work, pool = self._work, self._pool

        def run() -> None:
            for held in pool:
                poison(held)
            for each in work:
                each()

        self._gpu.queues.do(run)

    @contextmanager
    def captured(
        self, pool: object = None, stream: Stream | None = None, **_: object
    ) -> Iterator[None]:
        """Record work instead of doing it."""
        queues, before = self._gpu.queues, len(self._gpu.pool)
        if stream is queues.main:
            raise Violation("the default stream cannot be captured")
        queues.wait_for_all("begins to capture")
        self._gpu.recorded_for.add(pool)
        queues.capture = []
        try:
            yield
            self._work = queues.capture
            self._gpu.recorded_for.discard(pool)  # on failure, torch 2.11 does not
        finally:
            queues.capture = None
            self._pool = self._gpu.pool[before:]


@contextmanager
def pretended_gpu(
    eager: str = "none",
    *,
    largest: int = sys.maxsize,
    num_multiprocessors: int = 2,
    total_bytes: int = TOTAL_BYTES,
    make_launches: Callable[[PretendedGpu], Launches] = Launches,
) -> Iterator[tuple[PretendedGpu, Launches]]:
    """A GPU that torch detects, whose kernels the interpreter runs, their last programs first.

    Args:
        eager: the streams that do their work as it arrives; see ``Queues``.
        largest: see ``PretendedGpu``.
        num_multiprocessors: of the device.
        total_bytes: of its memory.
        make_launches: what to do with kernels.
    """
    gpu = PretendedGpu(eager, largest)
    launches = make_launches(gpu)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _functions(gpu, num_multiprocessors, total_bytes).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", gpu.end_recording, raising=False)
        copy = torch.UntypedStorage.copy_
        patch.setattr(
            torch.UntypedStorage,
            "copy_",
            lambda target, source, *options: _copy_storage(copy, target, source, *options),
        )
        # Interpreted kernels reject a GPU; these run on the host memory behind its tensors.
        patch.setattr(launcher, "INTERPRETED", False)
        for module in launches.modules():
            patch.setattr(module, "launch", launches)
        run_last_programs_first(patch)
        with gpu.plugged_in():
            yield gpu, launches


def _copy_storage(
    copy: Callable[..., Any], target: torch.UntypedStorage, source: Any, *options: Any
) -> Any:
    """``torch.UntypedStorage.copy_``, including from the device."""
    if isinstance(source, DeviceStorage):
        return source.copy_to(target)
    return copy(target, source, *options)


def _functions(gpu: PretendedGpu, num_multiprocessors: int, total_bytes: int) -> dict[str, Any]:
    queues = gpu.queues

    def register(address: int, num_bytes: int, flags: int) -> int:
        gpu.lock_address(address)
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: gpu.unlock_address(address)
    )

    def capture(graph: Graph, *options: Any, **more: Any) -> Any:
        return graph.captured(*options, **more)

    def synchronize(device: object = None) -> None:
        queues.refuse_wait("for all")
        queues.wait_for_all("waits for all")

    def empty_cache() -> None:
        if gpu.recorded_for:
            raise Violation("memory is given back while a graph is captured")

    functions: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_arch_list": lambda: ["sm_90"],
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=num_multiprocessors, shared_memory_per_multiprocessor=228 << 10
        ),
        "mem_get_info": lambda device=None: (total_bytes, total_bytes),
        "memory_reserved": lambda device=None: 0,
        "empty_cache": empty_cache,
        "synchronize": synchronize,
        "Stream": lambda device=None, priority=0: queues.new_stream(),
        "Event": lambda **options: Event(queues, **options),
        "stream": queues.using,
        "current_stream": lambda device=None: queues.current,
        "default_stream": lambda device=None: queues.main,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": lambda: Graph(gpu),
        "graph": capture,
        "cudart": lambda: runtime,
        "check_error": lambda status: None,
    }
    return functions
