"""The accepted keys, from the command line and from a key file that is reloaded on changes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from server.access.account import Limits
from server.access.caller import ANONYMOUS, Caller
from server.access.key_file import KeyEntry, KeyFile, read_key_file
from server.setting_sources import InvalidSettings

_WATCH_S = 1.0
_log = logging.getLogger(__name__)


class _AcceptedKey(NamedTuple):
    """An accepted key."""

    digest: bytes
    caller: Caller
    expires: dt.datetime | None = None


_NO_KEY = _AcceptedKey(bytes(hashlib.sha256().digest_size), ANONYMOUS)  # no key has this digest


class KeyRing:
    """Finds the caller that a key belongs to.

    Keys are looked up by a keyed digest of their SHA-256, with a secret of this process, and the
    SHA-256 found is compared in constant time. The time of a lookup may depend on the keyed digest.
    But clients cannot compute it for a guess, so timing does not reveal how close a guess is, and a
    lookup among many keys costs no more than one.

    Args:
        keys: keys with all rights, as given by --api-key.
        path: of the key file.
        make_caller: makes the caller of an entry.

    Raises:
        InvalidSettings: the key file cannot be used.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: Path | None = None,
        make_caller: Callable[[KeyEntry], Caller] = lambda entry: Caller(entry.name),
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._path = path
        self._make_caller = make_caller
        self._static_keys: dict[bytes, _AcceptedKey] = {
            self._keyed_digest(digest): _AcceptedKey(digest, ANONYMOUS)
            for digest in map(_sha256, keys)
        }
        self._keys: Mapping[bytes, _AcceptedKey] = self._static_keys
        self._callers: dict[str, Caller] = {}
        self._version: tuple[int, int] | None = None
        self._reload_asked = asyncio.Event()
        if path is not None:
            self._version = _version_of(path)
            self._accept(read_key_file(path))

    @property
    def requires_key(self) -> bool:
        """Whether requests need a key."""
        return bool(self._static_keys) or self._path is not None

    def find(self, key: bytes) -> Caller | None:
        """The owner of ``key``; None if the key is unknown, revoked or expired."""
        digest = hashlib.sha256(key).digest()
        known = self._keys.get(self._keyed_digest(digest), _NO_KEY)
        if not hmac.compare_digest(digest, known.digest):
            return None
        if known.expires is not None and dt.datetime.now(dt.UTC) >= known.expires:
            return None
        return known.caller

    def caller_of_tenant(self, tenant: str) -> Caller:
        """The caller of a tenant, for work that continues without its key (batches).

        If the tenant's entry was removed, its last known one is used, so that all usage is
        accounted.
        """
        return self._callers.get(tenant) or Caller(tenant)

    # ------------------------------------------------------------ a file that changes

    def reload(self) -> None:
        """Have ``watch`` reload the key file now, changed or not."""
        self._reload_asked.set()

    async def watch(self) -> None:
        """Reload the key file when it changes, until cancelled.

        If it is invalid, an error is logged, and the current keys stay.
        """
        path = self._path
        if path is None:
            return
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self._reload_asked.wait()
            if self._reload_asked.is_set() or _version_of(path) not in (None, self._version):
                self._reload_asked.clear()
                await self._reload(path)

    async def _reload(self, path: Path) -> None:
        self._version = _version_of(path)  # read first, so that a change meanwhile is noticed
        try:
            # On a thread: the longest file takes a second.
            file = await asyncio.to_thread(read_key_file, path)
        except InvalidSettings as error:
            _log.error("keeping the current keys: %s", error)
        else:
            self._accept(file)
            _log.info("reloaded the key file")

    def _accept(self, file: KeyFile) -> None:
        found = dict(self._static_keys)
        for entry in file.keys:
            caller = self._callers[entry.name] = self._make_caller(entry)
            for digest in map(bytes.fromhex, entry.sha256):
                found[self._keyed_digest(digest)] = _AcceptedKey(digest, caller, entry.expires)
        self._keys = found

    def _keyed_digest(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def limits_of(entry: KeyEntry) -> Limits:
    """The limits of an entry of the key file."""
    return Limits(
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        max_concurrent_requests=entry.max_concurrent_requests,
        tokens_per_day=entry.tokens_per_day,
        tokens_per_month=entry.tokens_per_month,
    )


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _version_of(path: Path) -> tuple[int, int] | None:
    """A value that changes with the file; None while it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino
