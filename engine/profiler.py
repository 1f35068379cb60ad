"""Traces: what ran when in a number of steps, for a person to look at.

    step ┬ schedule   which sequences, which blocks
         ├ inputs     the plan's rows, as tensors on the device
         ├ forward    layers and logits
         ├ sample     from logits to tokens
         └ output     the result is waited for and taken in

A step of several passes has the three in the middle for each. Overlapped, ``output`` is of an
earlier step than the ranges before it. The tensor library's profiler records the ranges with every
operation below them, and on a GPU every kernel. While no trace is recorded nothing here imports
that library, and a range costs a call and a comparison.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InvalidParameter, ProfileRefused
from engine.types import Trace

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

logger = logging.getLogger(__name__)

DEFAULT_PROFILE_STEPS = 64
MAX_PROFILE_STEPS = 10_000  # a step is some thousands of events, all in memory until the end

_GZIP_LEVEL = 1  # nobody's stream goes on meanwhile

_Range = AbstractContextManager[object]
_UNSEEN: _Range = nullcontext()


class Spans:
    """Marks the parts of a step: ``with spans("forward"): ...``.

    Held by whoever computes a part; switched by the ``Profiler`` alone, between steps.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: Callable[[str], _Range] | None = None

    def __call__(self, name: str) -> _Range:
        """The range ``name``, recorded if a trace is."""
        return _UNSEEN if self._open is None else self._open(name)

    def switch(self, open_range: Callable[[str], _Range] | None) -> None:
        """Record ranges by ``open_range`` from now on; None: no longer."""
        self._open = open_range


class Profiler:
    """Records steps, one trace at a time. All calls come between steps, from their thread.

    Args:
        directory: where traces are written; None refuses to record any.
        device: that computes the steps; a GPU's kernels are recorded too.
        spans: those that mark the steps' parts.
    """

    def __init__(self, directory: str | None, device: str, spans: Spans) -> None:
        self._directory = directory
        self._device = device
        self._spans = spans
        self._recording: profile | None = None
        self._num_steps = 0  # recorded so far
        self._num_wanted = 0
        self._ended: Trace | Exception | None = None  # how a recording ended by itself, until told

    def start(self, num_steps: int) -> None:
        """Record the next ``num_steps`` steps, or fewer if ``stop`` comes first.

        Raises:
            ProfileRefused: there is no directory, or a trace is being recorded.
            InvalidParameter: so many steps cannot be recorded.
        """
        if self._directory is None:
            raise ProfileRefused("Profiling is off.", code="profiling_off")
        if self._recording is not None:
            raise ProfileRefused("A profile is being recorded.", code="profile_running")
        if not 1 <= num_steps <= MAX_PROFILE_STEPS:
            raise InvalidParameter(
                f"'num_steps' must be between 1 and {MAX_PROFILE_STEPS}", param="num_steps"
            )
        # What torch.profiler is made of: that itself first imports the library's compiler, which
        # takes seconds in which everybody's streams would stand still.
        from torch.autograd.profiler import profile, record_function

        use_device = "cuda" if self._device.startswith("cuda") else None
        recording = profile(use_device=use_device, use_kineto=True)
        recording.__enter__()
        self._recording = recording
        self._num_steps, self._num_wanted, self._ended = 0, num_steps, None
        self._spans.switch(record_function)
        logger.info("recording a profile of %d steps", num_steps)

    def stop(self) -> Trace:
        """The trace that is being recorded, ended now, or one that ended by itself since.

        Raises:
            ProfileRefused: there is neither.
            OSError: it could not be written.
        """
        ended, self._ended = self._ended, None
        if isinstance(ended, Exception):
            raise ended
        if ended is not None:
            return ended
        if self._recording is None:
            raise ProfileRefused(
                "No profile is being recorded; a restart of the engine ends one.",
                code="profile_not_running",
            )
        return self._finish(self._recording)

    def count_step(self) -> None:
        """A step has been taken; the last one wanted ends the recording."""
        if self._recording is None:
            return
        self._num_steps += 1
        if self._num_steps >= self._num_wanted:
            try:
                self._ended = self._finish(self._recording)
            except Exception as error:  # a full disk must not end the engine
                logger.exception("the profile could not be written")
                self._ended = error

    def _finish(self, recording: profile) -> Trace:
        self._recording = None
        self._spans.switch(None)
        recording.__exit__(None, None, None)
        assert self._directory is not None
        time = datetime.now().astimezone().strftime("%Y%m%dT%H%M%S.%f")
        path = Path(self._directory) / f"quire-profile-{time}-{os.getpid()}.json.gz"
        # Under its own name the file is whole, whoever watches the directory.
        plain, packed = path.with_name(f".{path.stem}"), path.with_name(f".{path.name}")
        try:
            recording.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", _GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target)
            packed.rename(path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        logger.info("wrote a profile of %d steps to %s", self._num_steps, path)
        return Trace(str(path), self._num_steps)


def make_profile_directory(directory: str | Path) -> str:
    """Make sure that traces can be written there; returns its absolute path. Raises OSError."""
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
    return str(path)
