"""``quire run-batch``: a file of requests answered into a file, by an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine.client import EngineClient
from engine.errors import EngineError
from server.access.caller import ANONYMOUS
from server.batches.handlers import HANDLERS
from server.batches.line_execution import run_line
from server.batches.lines import InputValidator, Line, read_lines
from server.metrics import Metrics
from server.settings import Settings
from server.state import ServerState
from server.store.batches import LineResult

ResultCallback = Callable[[LineResult], None]
# Admitted whatever the queue's limit: there is no other work.
_CALLER = replace(ANONYMOUS, background=True)


class _Response(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


async def validate_file(path: Path, settings: Settings) -> InputValidator:
    """Validate a file; the result has its lines' count and errors. Raises OSError."""
    names = {*settings.model_names, *settings.adapters}
    found = InputValidator(HANDLERS, names.__contains__, settings.max_body_bytes, max_lines=None)
    await found.validate(path)
    return found


def prune_output(output: Path, *, discard_all: bool = False) -> set[str]:
    """Keep only the successful answers in ``output``, and return the ids of their requests.

    With ``discard_all``, remove all of it.

    Errors, which may not recur, and a line that was cut off are removed. Raises OSError.
    """
    ids: set[str] = set()
    if discard_all or not output.exists():
        output.write_bytes(b"")
        return ids
    directory = output.absolute().parent
    with (
        output.open("rb") as old,
        tempfile.NamedTemporaryFile(dir=directory, prefix=".run-batch-", delete=False) as new,
    ):
        try:
            for text in old:
                custom_id = _succeeded_id(text)
                if custom_id is not None and custom_id not in ids:
                    ids.add(custom_id)
                    new.write(text)
            new.flush()
            shutil.copymode(output, new.name)
            os.fsync(new.fileno())
            os.replace(new.name, output)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
    return ids


async def run_file(
    settings: Settings,
    engine: EngineClient,
    source: Path,
    output: Path,
    skip: set[str],
    on_result: ResultCallback,
) -> None:
    """Answer the requests in ``source``, appending each result to ``output`` as it is ready.

    Args:
        settings: of the model and of concurrency.
        engine: not started yet; closed at the end.
        source: a validated file.
        output: gets one line per request, in the order in which they end.
        skip: ids of requests that are not run.
        on_result: called with each result after it is written.

    Raises:
        EngineError: the model cannot be loaded, or the engine has ended.
        OSError: a file cannot be read or written.
    """
    metrics = Metrics(engine, prefix=settings.metrics_prefix, model_name=settings.model_names[0])
    state = ServerState(settings, engine, metrics)
    try:
        await state.load()
        if state.failure is not None:
            raise state.failure
        with output.open("ab") as file:
            await _run(state, source, file, skip, on_result)
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe has nothing to sync
                os.fsync(file.fileno())
    finally:
        await state.close()


async def _run(
    state: ServerState, source: Path, output: BinaryIO, skip: set[str], on_result: ResultCallback
) -> None:
    places = asyncio.Semaphore(state.settings.max_num_seqs)

    async def run(line: Line) -> None:
        async def answer(body: dict[str, Any]) -> Any:
            if state.failure is not None:
                raise _EngineGone(state.failure)
            return await HANDLERS[line.url](state, _CALLER, body)

        try:
            result = await run_line(line, answer)
        finally:
            places.release()
        output.write(result.text + b"\n")
        output.flush()
        on_result(result)

    try:
        async with asyncio.TaskGroup() as tasks:
            lines = read_lines(source, HANDLERS, state.settings.max_body_bytes)
            async with contextlib.aclosing(lines):
                async for line in lines:
                    if line.custom_id not in skip:
                        await places.acquire()
                        tasks.create_task(run(line))
    except* _EngineGone as ended:
        raise ended.exceptions[0].__cause__ or EngineError("the engine has ended") from None
    except* OSError as errors:
        raise errors.exceptions[0] from None


class _EngineGone(BaseException):
    """The engine is gone for good: this ends the run, not just one line."""

    def __init__(self, cause: EngineError) -> None:
        super().__init__()
        self.__cause__ = cause


def _succeeded_id(text: bytes) -> str | None:
    """The id of the request that a line of an output file answers, if it succeeded."""
    try:
        line = msgspec.json.decode(text, type=_OutputLine)
    except msgspec.DecodeError:
        return None
    succeeded = line.response is not None and line.response.status_code == 200
    return line.custom_id if succeeded and text.endswith(b"\n") else None
