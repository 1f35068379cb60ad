"""Traces: a timeline of what ran in a number of steps.

    step ┬ schedule   which sequences, which blocks
         ├ inputs     the plan's rows, as tensors on the device
         ├ forward    layers and logits
         ├ sample     from logits to tokens
         └ output     awaiting and processing the result

A step of several passes repeats the three middle ranges for each pass. With overlap, ``output``
belongs to an earlier step than the ranges before it. The tensor library's profiler records these
ranges with every operation in them, and on a GPU every kernel. While no trace is recorded, nothing
here imports that library, and a range costs a call and a comparison.
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
MAX_PROFILE_STEPS = 10_000  # a step has thousands of events, which stay in memory until the end

_GZIP_LEVEL = 1  # all streams pause while the file is written

_Range = AbstractContextManager[object]
_NO_RANGE: _Range = nullcontext()


class Spans:
    """Marks the parts of a step: ``with spans("forward"): ...``.

    Used by the code that computes a part; switched only by the ``Profiler``, between steps.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: Callable[[str], _Range] | None = None

    def __call__(self, name: str) -> _Range:
        """The range ``name``; recorded only while a trace is."""
        return _NO_RANGE if self._open is None else self._open(name)

    def switch(self, open_range: Callable[[str], _Range] | None) -> None:
        """Record ranges with ``open_range`` from now on; None: stop."""
        self._open = open_range


class Profiler:
    """Records steps, one trace at a time. Used only by the engine's thread, between steps.

    Args:
        directory: where traces are written; None: profiling is refused.
        device: the device that computes the steps; a GPU's kernels are recorded too.
        spans: marks the parts of the steps.
    """

    def __init__(self, directory: str | None, device: str, spans: Spans) -> None:
        self._directory = directory
        self._device = device
        self._spans = spans
        self._recording: profile | None = None
        self._num_steps = 0  # recorded so far
        self._num_wanted = 0
        self._ended: Trace | Exception | None = None  # unreported result of a recording

    def start(self, num_steps: int) -> None:
        """Record the next ``num_steps`` steps, or fewer if ``stop`` comes first.

        Raises:
            ProfileRefused: there is no directory, or a trace is already being recorded.
            InvalidParameter: the number of steps is out of range.
        """
        if self._directory is None:
            raise ProfileRefused("Profiling is off.", code="profiling_off")
        if self._recording is not None:
            raise ProfileRefused("A profile is being recorded.", code="profile_running")
        if not 1 <= num_steps <= MAX_PROFILE_STEPS:
            raise InvalidParameter(
                f"'num_steps' must be between 1 and {MAX_PROFILE_STEPS}", param="num_steps"
            )
        # These are what torch.profiler uses internally. Importing torch.profiler would first import
        # the library's compiler, which takes seconds and would stall every stream.
        from torch.autograd.profiler import profile, record_function

        use_device = "cuda" if self._device.startswith("cuda") else None
        recording = profile(use_device=use_device, use_kineto=True)
        recording.__enter__()
        self._recording = recording
        self._num_steps, self._num_wanted, self._ended = 0, num_steps, None
        self._spans.switch(record_function)
        logger.info("recording a profile of %d steps", num_steps)

    def stop(self) -> Trace:
        """End the current recording and return its trace, or that of one that has ended by itself.

        Raises:
            ProfileRefused: there is neither.
            OSError: the trace could not be written.
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
        """Count a finished step; the last one requested ends the recording."""
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
        # Write under a temporary name, so that the file is always complete under its own.
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
    """Create a writable directory; returns its absolute path. Raises OSError if it cannot."""
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path).close()
    return str(path)
