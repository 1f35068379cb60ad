"""The pretended GPU's rules: each is broken once, by code that would fail on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.runner.graphs import CudaCapture
from engine.runner.step_peers import NotCapturedError
from kernels.triton.feedback import feed_back
from kernels.triton.layers import rms_norm
from tests.pretended_gpu.queues import Violation
from tests.pretended_gpu.stand_in import pretended_gpu
from tests.pretended_gpu.tensor import DEVICE

NUMBERS = torch.arange(6.0)


def there(values: torch.Tensor = NUMBERS) -> torch.Tensor:
    return values.pin_memory().to(DEVICE, non_blocking=True)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "condition": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: torch.nonzero(x),
    "mask": lambda x: x[x > 1],
    "list": lambda x: torch.tensor([1, 2], device=x.device),
    "number by index": lambda x: x.__setitem__(there(torch.tensor([0, 2])), 1.0),
    "index of the host": lambda x: x[torch.tensor([0, 2])],
    "ordinary memory": lambda x: x.copy_(torch.zeros(6), non_blocking=True),
    "blocking copy": lambda x: x.copy_(torch.zeros(6).pin_memory()),
    "other dtype": lambda x: x.copy_(torch.zeros(6).double().pin_memory(), non_blocking=True),
    "into ordinary memory": lambda x: torch.empty(6).copy_(x, non_blocking=True),
    "device": lambda x: torch.cuda.synchronize(),
    "event": lambda x: fetched(x)[1].synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_does_not_wait_in_a_step(name: str) -> None:
    with pretended_gpu() as (gpu, _):
        WAITS[name](there())
        x = there()
        with gpu.step(), pytest.raises(Violation, match="in a step, the host waits"):
            WAITS[name](x)


def test_what_does_not_wait_is_right() -> None:
    with pretended_gpu() as (gpu, _):
        with gpu.step():
            x = there()
            x[:2] = 7.0
            x.index_fill_(0, there(torch.tensor([5])), 9.0)
            y = torch.where(x > 3, x * 2, 0.0).view(2, 3).sum(1)
            z = torch.cat((y, x[3:4])).sort(descending=True).values
        assert z.tolist() == [28.0, 26.0, 3.0]
        assert x.device == DEVICE


def test_tensors_of_both_sides_are_not_mixed() -> None:
    with pretended_gpu(), pytest.raises(Violation, match="of the host and of the device"):
        there() + NUMBERS


def fetched(x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    target = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    target.fill_(-1.0).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return target, event


def test_results_are_there_once_they_are_waited_for() -> None:
    with pretended_gpu():
        target, event = fetched(there() + 1)
        assert target.tolist() == [-1.0] * 6
        event.synchronize()
        assert target.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_buffer_that_is_written_while_it_is_read_has_what_was_written() -> None:
    with pretended_gpu():
        buffer = torch.zeros(2).pin_memory()
        x = torch.empty(2, device=DEVICE)
        x.copy_(buffer, non_blocking=True)
        buffer.numpy()[:] = 5.0
        assert x.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_beside_reads_what_is_there(waits: bool) -> None:
    with pretended_gpu("side"):
        side, x = torch.cuda.Stream(), there() + 1
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target, event = fetched(x)
        event.synchronize()
        assert (target[0].item() == 1.0) == waits


@pytest.mark.parametrize("tells", [True, False])
def test_memory_is_somebody_elses_once_it_is_given_back(tells: bool) -> None:
    with pretended_gpu("main"):
        side, x = torch.cuda.Stream(), there() + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target, event = fetched(x)
            if tells:
                x.record_stream(side)
        del x
        event.synchronize()
        assert (target[0].item() == 1.0) == tells


def captured(
    function: Callable[[], object], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream or torch.cuda.Stream()):
        function()
    return graph


def test_a_graph_does_again_what_it_did() -> None:
    with pretended_gpu() as (gpu, _):
        x, y = there(), torch.zeros(6, device=DEVICE)
        graph = captured(lambda: y.copy_((x + 1) * 2))
        assert y.tolist() == [0.0] * 6, "a capture computes nothing"
        for start in (0.0, 3.0):
            with gpu.step():
                x.fill_(start)
                graph.replay()
            assert y.tolist() == [2.0 * (start + 1)] * 6


def test_a_graph_reads_what_is_left_of_memory_that_was_given_back() -> None:
    with pretended_gpu():
        held, y = [there()], torch.zeros(6, device=DEVICE)
        graph = captured(lambda: y.copy_(held[0] + 1))
        held.clear()
        graph.replay()
        assert np.isnan(y.cpu().numpy()).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0].item(),
        lambda x: x.copy_(torch.zeros(6).pin_memory(), non_blocking=True),
        lambda x: torch.cuda.Event().synchronize(),
        lambda x: torch.nonzero(x),
    ],
)
def test_a_capture_refuses_what_it_cannot_hold(function: Callable[[torch.Tensor], object]) -> None:
    with pretended_gpu():
        x = there()
        with pytest.raises(Violation, match="while a graph is captured"):
            captured(lambda: function(x))


def test_the_default_stream_is_not_captured() -> None:
    with pretended_gpu(), pytest.raises(Violation, match="default stream"):
        captured(lambda: None, torch.cuda.default_stream())


def test_a_capture_that_fails_leaves_the_allocator_as_it_was() -> None:
    """Otherwise torch 2.11 treats the capture as still in progress."""
    with pretended_gpu():
        capture, x = CudaCapture(), there()
        with pytest.raises(NotCapturedError, match="while a graph is captured"):
            capture(x.tolist)
        torch.cuda.empty_cache()
        replay, doubled = capture(lambda: x * 2)
        replay()
        assert doubled.tolist() == (2 * NUMBERS).tolist()


def test_kernels_run_on_the_devices_tensors() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pretended_gpu() as (gpu, launches):
        with gpu.step():
            normed = rms_norm(there(x), there(weight), 1e-5)
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(normed.cpu(), expected)
        with pytest.raises(Violation, match="_add_rms_norm_kernel is given a tensor of the host"):
            rms_norm(there(x), weight, 1e-5)
        assert not launches.new(lambda: rms_norm(there(x), there(weight), 1e-3))


def test_what_another_alignment_compiles_is_told() -> None:
    newest, lines = torch.zeros(9, dtype=torch.int64), torch.full((9,), -1, dtype=torch.int32)
    chosen = torch.tensor([4, 5])
    with pretended_gpu() as (_, launches):
        on_device = [there(each) for each in (newest, lines, chosen)]
        slots = there(torch.arange(8, dtype=torch.int32))

        def feed(first: int, line: torch.Tensor) -> None:
            feed_back(on_device[0], slots[first : first + 2], on_device[2], line)

        feed(0, on_device[1])
        assert not launches.new(lambda: feed(1, on_device[1])), "slots may begin anywhere"
        assert launches.new(lambda: feed(0, on_device[1][1:]))
        assert on_device[0].tolist()[:3] == [4, 5, 5]
