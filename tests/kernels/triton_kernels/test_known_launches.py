"""A launch that was made before finds the compiled kernel that Triton would have found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from kernels.triton.known_launches import KnownLaunches, describe
from tests.interpreter import unless_interpreted
from tests.kernels.triton_kernels import aot, aot_cases

pytestmark = unless_interpreted

VALUES: list[Any] = [
    *(None, 0.0, 1.0, 16.0),
    *(0, 1, 2, 15, 16, 17, 32, -1, -16),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 - 16, 2**40, 2**63 - 1, 2**63, 2**63 + 16),
    *(
        torch.zeros(64, dtype=dtype)[offset:]
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn)
        for offset in (0, 1, 16)
    ),
]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are bound as for a GPU of compute capability 9.0."""
    monkeypatch.setattr(triton.runtime.driver, "_active", aot.Target())


@triton.jit
def kernel(first, second, third, width: tl.constexpr):
    tl.store(first, second + third)


def specialised(value: Any) -> Any:
    """What Triton compiles a kernel for, in place of its second argument."""
    *_, bind = kernel.create_binder()
    _, found, _ = bind(VALUES[-1], value, 0.5, width=1)
    return found[1]


def test_what_triton_tells_apart_is_told_apart() -> None:
    for one, other in itertools.combinations(VALUES, 2):
        if describe((one,)) == describe((other,)):
            assert specialised(one) == specialised(other), (one, other)
    assert len({str(describe((value,))) for value in VALUES}) < len(VALUES) / 1.5, "but no more"


@pytest.mark.parametrize("value", [True, "text", tl.float32, object()])
def test_what_is_no_usual_argument_goes_tritons_way(value: Any) -> None:
    assert describe((value,)) is None


class Compiled:
    """Notes the arguments that it is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launched.append((grid, *args))


class Noted:
    """A kernel that compiles nothing, but notes what goes Triton's way."""

    def __init__(self, function: Any) -> None:
        self.fn, self.params = function.fn, function.params
        self.pre_run_hooks = function.pre_run_hooks
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **meta: Any) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


def test_a_known_launch_is_given_all_arguments_in_tritons_order() -> None:
    noted, launches, args = Noted(kernel), KnownLaunches(), (VALUES[-1], 5, 0.5)
    for grid in ((3,), (4, 2), (5, 1, 2)):
        launches.launch(noted, 0, grid, args, {"num_warps": 4, "width": 7})
    (compiled,) = noted.compiled
    bound, _, _ = kernel.create_binder()[-1](*args, num_warps=4, width=7)
    assert compiled.launched == [((4, 2, 1), *bound.values()), ((5, 1, 2), *bound.values())]


@pytest.mark.parametrize(
    ("args", "meta", "device"),
    [
        ((VALUES[-1], 16, 0.5), {"width": 7}, 0),
        ((VALUES[-1], 5, 0.5), {"width": 8}, 0),
        ((VALUES[-1], 5, 0.5), {"width": 7.0}, 0),
        ((VALUES[-1], 5, 0.5), {"width": 7, "num_warps": 8}, 0),
        ((VALUES[-1], 5, 0.5), {"width": 7}, 1),
        ((VALUES[-2], 5, 0.5), {"width": 7}, 0),
    ],
    ids=["argument", "constant", "its type", "option", "device", "alignment"],
)
def test_another_launch_is_compiled_anew(
    args: tuple[Any, ...], meta: dict[str, Any], device: int
) -> None:
    noted, launches = Noted(kernel), KnownLaunches()
    launches.launch(noted, 0, (1,), (VALUES[-1], 5, 0.5), {"width": 7})
    launches.launch(noted, device, (1,), args, meta)
    assert len(noted.compiled) == 2


def test_values_by_name_and_constants_by_place_go_tritons_way() -> None:
    noted, launches = Noted(kernel), KnownLaunches()
    for _ in range(2):
        launches.launch(noted, 0, (1,), (VALUES[-1], 5), {"third": 0.5, "width": 7})
        launches.launch(noted, 0, (1,), (VALUES[-1], 5, 0.5, 7), {})
    assert len(noted.compiled) == 4
    assert not any(compiled.launched for compiled in noted.compiled)


class Large(Noted):
    """A kernel whose launches do not fit: a stage takes ``stage_bytes``, of the 99 KB there are."""

    def __init__(self, stage_bytes: int, what: str = "shared memory") -> None:
        super().__init__(kernel)
        self.__name__ = "large"
        self._stage_bytes, self._what = stage_bytes, what
        self.tried: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        launch = super().__getitem__(grid)

        def run(*args: Any, **meta: Any) -> Compiled:
            self.tried.append(meta.get("num_stages", 3))
            required = self._stage_bytes * self.tried[-1]
            if required > 99 << 10:
                raise OutOfResources(required, 99 << 10, self._what)
            return launch(*args, **meta)

        return run


@pytest.mark.parametrize(
    ("meta", "kilobytes", "tried"),
    [
        ({"num_stages": 8}, 16, [8, 6]),
        ({"num_stages": 4}, 48, [4, 2]),
        ({}, 98, [3, 1]),
        ({"num_stages": 2}, 49, [2]),
    ],
)
def test_what_does_not_fit_is_launched_with_fewer_stages_and_known_then(
    meta: dict[str, Any], kilobytes: int, tried: list[int]
) -> None:
    large, launches = Large(kilobytes << 10), KnownLaunches()
    for _ in range(3):
        launches.launch(large, 0, (1,), (VALUES[-1], 5, 0.5), {**meta, "width": 7})
    assert large.tried == tried
    (compiled,) = large.compiled
    assert len(compiled.launched) == 2, "without another search"


def test_what_does_not_fit_at_all_is_an_error() -> None:
    for large in (Large(100 << 10), Large(30 << 10, what="threads")):
        with pytest.raises(OutOfResources):
            KnownLaunches().launch(large, 0, (1,), (VALUES[-1], 5, 0.5), {"num_stages": 4})


@pytest.mark.parametrize(
    "case",
    ["decode-llama-8b", "prefill-gemma3-4b-images", "layer-llama-8b", "moe-decode-gpt-oss-20b"],
)
def test_our_kernels_are_known_after_one_launch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: dict[str, Noted] = {}
    launches = KnownLaunches()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        if kernel.__name__ not in noted:
            noted[kernel.__name__] = Noted(kernel)
            launches.launch(noted[kernel.__name__], 0, grid, args, meta)
            launches.launch(noted[kernel.__name__], 0, grid, args, meta)

    for module in aot.launching_modules():
        monkeypatch.setattr(module, "launch", launch)
    aot_cases.CASES[case]()
    assert noted
    for each in noted.values():
        (compiled,) = each.compiled
        assert len(compiled.launched) == 1
