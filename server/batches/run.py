"""The execution of one batch, from its current status to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Literal

import msgspec

from server.batches.environment import BatchEnvironment
from server.batches.line_execution import run_line
from server.batches.lines import BatchError, InputValidator, Line, LineError, read_lines
from server.batches.outputs import write_outputs
from server.store.batches import ACTIVE_STATUSES, BatchStore, LineResult, StoredBatch
from server.store.database import StoreError
from server.store.files import StoredFile

_CANCEL_POLL_S = 1.0  # between checks for a cancellation by any process
_STORE_TRIES = 5
_RETRY_DELAY_S = 1.0
_log = logging.getLogger(__name__)

StopReason = Literal["cancelling", "expired"]


class BatchRun:
    """Takes one batch through its statuses. The runner ensures that no other process does."""

    def __init__(self, env: BatchEnvironment, batch: StoredBatch) -> None:
        self._env = env
        self._store = env.batches
        self.batch = batch

    async def run(self) -> None:
        """Run until the batch has ended. If cancelled, it can be resumed later.

        A full disk, an unreadable input, or a line that has become too long fails the batch.
        """
        try:
            await self._run()
        except (StoreError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            _log.error("batch %s failed: %s", self.batch.id, reason)
            message = f"The server could not read or keep what belongs to this batch: {reason}"
            await self._fail([BatchError(code="storage_failed", message=message)])
        except LineError as fault:
            await self._fail([fault.report()])

    async def _run(self) -> None:
        batch = self.batch
        file = await self._env.files.get(batch.tenant, batch.input_file_id)
        if file is None:
            message = "The input file does not exist any more."
            error = BatchError(code="file_not_found", message=message, param="input_file_id")
            await self._fail([error])
            return
        if batch.status == "validating":
            await self._validate(file)
        if self.batch.status == "in_progress":
            await self._process(file)
        if self.batch.status in ("finalizing", "cancelling"):
            await self._finish(file)

    # ------------------------------------------------------------ validating

    async def _validate(self, file: StoredFile) -> None:
        bench, batch = self._env, self.batch
        judge = InputValidator([batch.endpoint], bench.has_model, bench.max_line_bytes)
        await judge.validate(bench.files.path(file))
        if judge.errors:
            await self._fail(judge.errors)
            return
        found = {"num_lines": judge.num_lines, "model": judge.model}
        moved = await self._store.transition(
            batch.id, ["validating"], "in_progress", in_progress_at=_now(), **found
        )
        if moved is None:  # cancelled meanwhile
            moved = await self._store.transition(batch.id, ["cancelling"], "cancelling", **found)
        await self._update_batch(moved)

    # ------------------------------------------------------------ in progress

    async def _process(self, file: StoredFile) -> None:
        """Run the lines without a result, until all have one or there is a reason to stop."""
        work = asyncio.create_task(self._run_lines(file))
        watch = asyncio.create_task(self._wait_for_stop())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            stopped = watch.result() if not work.done() else None
        finally:
            await _cancel_and_wait(watch)
            await _cancel_and_wait(work)
        if stopped is None:
            work.result()  # re-raises its exception
        moved = await self._store.transition(
            self.batch.id, ["in_progress"], "finalizing", finalizing_at=_now()
        )
        await self._update_batch(moved)

    async def _wait_for_stop(self) -> StopReason:
        """Wait until the batch is cancelled or its completion window ends."""
        now: StoredBatch | None = self.batch
        while now is not None and now.status == "in_progress":
            if _now() >= now.expires_at:
                return "expired"
            await asyncio.sleep(_CANCEL_POLL_S)
            with contextlib.suppress(StoreError):
                now = await self._store.get(self.batch.tenant, self.batch.id)
        return "cancelling"

    async def _run_lines(self, file: StoredFile) -> None:
        bench, batch = self._env, self.batch
        recorder = _Recorder(bench.batches, batch.id)
        answer = bench.handler_for(batch)
        running: set[asyncio.Task[None]] = set()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run(line: Line) -> None:
            await recorder.put(await run_line(line, answer))

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            bench.slots.release()
            if not task.cancelled() and (error := task.exception()) and not failed.done():
                failed.set_exception(error)

        try:
            finished = await bench.batches.finished_lines(batch.id)
            lines = read_lines(
                bench.files.path(file), [batch.endpoint], bench.max_line_bytes, finished
            )
            async with contextlib.aclosing(lines):
                async for line in lines:
                    await bench.slots.acquire()
                    if failed.done():
                        bench.slots.release()
                        break
                    task = asyncio.create_task(run(line))
                    running.add(task)
                    task.add_done_callback(ended)
            await asyncio.gather(*running)
            if failed.done():
                failed.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await recorder.close()
            if failed.done():
                failed.exception()  # marks the exception as retrieved

    # ------------------------------------------------------------ the end

    async def _finish(self, file: StoredFile) -> None:
        """Write the results files, and move to the final status."""
        bench, batch = self._env, self.batch
        finished = await bench.batches.finished_lines(batch.id)
        cancelled = batch.cancelling_at is not None
        whole = not cancelled and len(finished) >= batch.num_lines
        ids = await write_outputs(bench, batch, file, finished)
        outputs = {"output_file_id": ids[0], "error_file_id": ids[1]}
        if cancelled:
            await self._store.transition(
                batch.id, ["cancelling"], "cancelled", cancelled_at=_now(), **outputs
            )
        elif whole:
            await self._store.transition(
                batch.id, ["finalizing"], "completed", completed_at=_now(), **outputs
            )
        else:
            await self._store.transition(
                batch.id, ["finalizing"], "expired", expired_at=_now(), **outputs
            )

    async def _fail(self, errors: list[BatchError]) -> None:
        """End the batch as failed, retrying until the status is written."""
        errors_json = msgspec.json.encode(errors).decode()
        while True:
            try:
                await self._store.transition(
                    self.batch.id, ACTIVE_STATUSES, "failed", failed_at=_now(), errors=errors_json
                )
            except StoreError:
                await asyncio.sleep(_RETRY_DELAY_S)
            else:
                return

    async def _update_batch(self, moved: StoredBatch | None) -> None:
        """Continue with the updated batch; None means that it was cancelled meanwhile."""
        if moved is None:
            moved = await self._store.get(self.batch.tenant, self.batch.id)
        if moved is not None:
            self.batch = moved


class _Recorder:
    """Writes results as they arrive; those that arrive during a write share the next one."""

    def __init__(self, store: BatchStore, batch_id: str) -> None:
        self._store = store
        self._batch_id = batch_id
        self._pending: list[LineResult] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, result: LineResult) -> None:
        """Store a result and return once it is written. Raises StoreError."""
        self._pending.append(result)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Wait for pending writes."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._pending:
            results, self._pending = self._pending, []
            for tries_left in reversed(range(_STORE_TRIES)):
                try:
                    await self._store.record(self._batch_id, results)
                    break
                except StoreError:
                    if not tries_left:
                        raise
                    await asyncio.sleep(_RETRY_DELAY_S)


async def _cancel_and_wait(task: asyncio.Task[object]) -> None:
    """Cancel a task and wait for its end; its exception is not raised."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _now() -> int:
    return int(time.time())
