"""The native linear layers for each kind of processor that this one is or can emulate."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import pytest

from kernels.cpu import bindings, linear
from kernels.cpu.native import build

_STAND_INS = ("avx2", "avx2-vnni", "neon")
# Each is a library to compile. Where a processor has no more, it is the processor's own.
STAND_INS = tuple(pytest.param(name, marks=pytest.mark.slow) for name in _STAND_INS)
WAYS = ("vectors", "amx", *STAND_INS)  # the first two are this processor's own


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compute layers that the test creates from now on this way; skip if it is unavailable here.

    Returns:
        Whether the way is that of ``native/vectors``: int4 weights are multiplied in groups for any
        number of rows, and codes of checkpoints are always unpacked.
    """
    if way in _STAND_INS:
        library = _library_of(way)
        monkeypatch.setattr(build, "load", lambda: library)
        monkeypatch.setattr(build, "open_library", lambda: library)
        monkeypatch.setattr(bindings, "_bind", functools.cache(bindings._bind.__wrapped__))
        monkeypatch.setattr(linear, "_library", functools.cache(linear._library.__wrapped__))
        return True
    library, has_amx = linear._library()
    if way == "amx" and not has_amx:
        pytest.skip("no AMX")
    monkeypatch.setattr(linear, "_library", lambda: (library, way == "amx"))
    return "vectors" in build._select_target().folders


def slow_unless_own(targets: Iterable[str]) -> list[Any]:
    """Parameters of tests for each target, slow where its library is not the processor's own."""
    try:
        own = build.target_name()
    except build.BuildError:
        own = None
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(target, marks=marks[target == own]) for target in targets]


@functools.cache
def _library_of(target: str) -> ctypes.CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CPU_TARGET", target)
        try:
            path = build.library_path()
        except build.BuildError as error:
            pytest.skip(str(error))
    return ctypes.CDLL(str(path))
