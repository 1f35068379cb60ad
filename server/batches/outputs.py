"""The output files of a batch: one of responses, one of errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import BinaryIO

from server.batches.environment import BatchEnvironment
from server.batches.line_execution import not_run_line
from server.batches.lines import read_lines
from server.store.batches import StoredBatch
from server.store.files import FileStore, StoredFile

_PAGE = 100  # results held in memory at once
_NOT_RUN = {
    True: ("batch_cancelled", "The batch was cancelled before this request was executed."),
    False: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


async def write_outputs(
    env: BatchEnvironment, batch: StoredBatch, file: StoredFile, finished: set[int]
) -> tuple[str | None, str | None]:
    """Write a batch's results to files; lines without a result are listed as errors.

    The files' ids are derived from the batch's, so a repetition replaces the same files.

    Returns the ids of the output file and of the error file; None for one that would be empty.
    Raises StoreError or OSError.
    """
    outputs = _OutputFile(env.files, batch, "output"), _OutputFile(env.files, batch, "error")
    try:
        for output in outputs:
            await output.open()
        after = 0
        while page := await env.batches.results(batch.id, after, _PAGE):
            for ok, output in zip((True, False), outputs, strict=True):
                await output.write([text for _, this_ok, text in page if this_ok == ok])
            after = page[-1][0]
        if len(finished) < batch.num_lines:
            reason = _NOT_RUN[batch.cancelling_at is not None]
            path = env.files.path(file)
            async for line in read_lines(path, [batch.endpoint], env.max_line_bytes, finished):
                await outputs[1].write([not_run_line(line, *reason)])
        good, bad = [await output.store() for output in outputs]
        return good, bad
    finally:
        for output in outputs:
            output.discard()


class _OutputFile:
    """A file being written."""

    def __init__(self, files: FileStore, batch: StoredBatch, kind: str) -> None:
        self._files = files
        self._batch = batch
        self._kind = kind
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._num_bytes = 0

    async def open(self) -> None:
        self._path = await self._files.new_partial()
        self._file = await asyncio.to_thread(self._path.open, "wb")

    async def write(self, lines: list[bytes]) -> None:
        assert self._file is not None
        if lines:
            data = b"\n".join(lines) + b"\n"
            self._num_bytes += len(data)
            await asyncio.to_thread(self._file.write, data)

    async def store(self) -> str | None:
        """Store it as a file of the batch's tenant, unless it is empty."""
        assert self._file is not None
        assert self._path is not None
        await asyncio.to_thread(_close, self._file)
        if not self._num_bytes:
            return None
        batch, now = self._batch, int(time.time())
        digest = hashlib.blake2b(f"{batch.id}/{self._kind}".encode(), digest_size=16)
        life_s = batch.output_life_s
        file = StoredFile(
            id=f"file-{digest.hexdigest()}",
            tenant=batch.tenant,
            filename=f"{batch.id}_{self._kind}.jsonl",
            purpose="batch_output",
            num_bytes=self._num_bytes,
            created_at=now,
            expires_at=None if life_s is None else now + life_s,
        )
        await self._files.add(file, self._path)
        return file.id

    def discard(self) -> None:
        """Delete the file unless it was stored."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk may be too full to flush buffers
                self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _close(file: BinaryIO) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())
