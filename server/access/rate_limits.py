"""The state of each tenant's limits, exact across all API workers.

There is one record per tenant: two token buckets and, for each worker, the requests it serves now.
Several workers share the records through a memory-mapped file; its lock is held for the
microseconds of one change. Dividing each limit by the number of workers would need none of this,
but a client with few connections, which the kernel assigns to few workers, would then get only a
part of its limit.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME_BYTES = 16
_NO_NAME = bytes(_NAME_BYTES)
_BUCKET = struct.Struct("<dd")  # tokens missing from full, at time.monotonic() seconds
_BUCKETS = ("requests", "tokens")
_COUNT = struct.Struct("<I")
_NUM_RECORDS = 1 << 16  # a sparse file: untouched records take no space


class RateLimitStore:
    """The records of one server.

    Args:
        path: of the file that the workers share; None if this is the only process.
        worker: this worker's index, from 0.
        num_workers: how many there are.
    """

    def __init__(self, path: Path | None = None, worker: int = 0, num_workers: int = 1) -> None:
        self._size = _NAME_BYTES + _BUCKET.size * len(_BUCKETS) + _COUNT.size * num_workers
        self._worker = worker
        self._num_workers = num_workers
        self._offsets: dict[str, int] = {}
        self._file: int | None = None
        if path is None:
            self._bytes = mmap.mmap(-1, self._size * _NUM_RECORDS)
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, self._size * _NUM_RECORDS)
        self._bytes = mmap.mmap(self._file, self._size * _NUM_RECORDS)
        with self._lock():
            self._clear_stale_requests()

    @contextmanager
    def record(self, name: str) -> Iterator[TenantRecord]:
        """Lock and yield a tenant's record; the block must not await."""
        with self._lock():
            offset = self._offsets.get(name)
            if offset is None:
                offset = self._offsets[name] = self._find(name)
            yield TenantRecord(self._bytes, offset, self._worker, self._num_workers)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _find(self, name: str) -> int:
        """The offset of a tenant's record, which is created if needed (open addressing)."""
        digest = hashlib.blake2b(name.encode(), digest_size=_NAME_BYTES).digest()
        index = int.from_bytes(digest[:8], "little")
        for step in range(_NUM_RECORDS):
            offset = (index + step) % _NUM_RECORDS * self._size
            there = self._bytes[offset : offset + _NAME_BYTES]
            if there == digest:
                return offset
            if there == _NO_NAME:
                self._bytes[offset : offset + _NAME_BYTES] = digest
                return offset
        raise RuntimeError("there have been more tenants than there are records")

    def _clear_stale_requests(self) -> None:
        """Clear the requests of a dead worker whose place this one takes."""
        for offset in range(0, self._size * _NUM_RECORDS, self._size):
            if self._bytes[offset : offset + _NAME_BYTES] != _NO_NAME:
                TenantRecord(self._bytes, offset, self._worker, self._num_workers).set_serving(0)


class TenantRecord:
    """One tenant's record, valid within the block of ``RateLimitStore.record``."""

    __slots__ = ("_bytes", "_counts", "_num_workers", "_offset", "_worker")

    def __init__(self, data: mmap.mmap, offset: int, worker: int, num_workers: int) -> None:
        self._bytes = data
        self._offset = offset + _NAME_BYTES
        self._counts = self._offset + _BUCKET.size * len(_BUCKETS)
        self._worker = worker
        self._num_workers = num_workers

    def bucket_deficit(self, bucket: str, per_s: float, now_s: float) -> float:
        """How far a bucket that refills at ``per_s`` is from full; 0 initially."""
        lacks, since_s = _BUCKET.unpack_from(self._bytes, self._bucket_offset(bucket))
        return max(0.0, lacks - (now_s - since_s) * per_s)

    def set_bucket_deficit(self, bucket: str, lacks: float, now_s: float) -> None:
        """Set how far the bucket is from full now."""
        _BUCKET.pack_into(self._bytes, self._bucket_offset(bucket), lacks, now_s)

    @property
    def num_serving(self) -> int:
        """Requests that all workers together serve now."""
        counts = range(self._num_workers)
        return sum(
            _COUNT.unpack_from(self._bytes, self._counts + _COUNT.size * worker)[0]
            for worker in counts
        )

    def add_serving(self, change: int) -> None:
        """Change the number of requests that this worker serves."""
        (here,) = _COUNT.unpack_from(self._bytes, self._counts + _COUNT.size * self._worker)
        self.set_serving(here + change)

    def set_serving(self, count: int) -> None:
        """Set the number of requests that this worker serves."""
        _COUNT.pack_into(self._bytes, self._counts + _COUNT.size * self._worker, count)

    def _bucket_offset(self, bucket: str) -> int:
        return self._offset + _BUCKET.size * _BUCKETS.index(bucket)
