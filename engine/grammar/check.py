"""Checks grammars before anything is promised to a client, with limits on time and memory."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from engine.sandbox.process import SandboxedProcess
from engine.types import Grammar

CHECK_LIMIT_S = 1.5
_HANDLER = Path(__file__).with_name("check_worker.py")
_MODULES = ("llguidance", "msgspec", "numpy", "engine")
_MAX_BYTES = 512 * 1024  # size limit of a grammar's text
_MAX_CACHED = 20_000
_TIMEOUT_KEPT_S = 60.0  # how long a grammar that took too long is refused without trying again
_NUM_CHILDREN = 2  # so that one slow grammar does not block all others


class Refusal(NamedTuple):
    """Why a grammar cannot be used. The message is meant for the client and names no field."""

    message: str
    code: str | None  # "grammar_timeout" if it takes too much time or memory


class _Verdict(NamedTuple):
    refusal: Refusal | None
    valid_until_s: float  # monotonic


class GrammarChecker:
    """Checks grammars in killable processes, and caches the results.

    Belongs to one event loop. A cached result is a digest and a verdict: some hundred bytes. What
    may not be the grammar's fault is cached for a while (a time-out) or not at all (a process that
    has ended).
    """

    def __init__(self, *, limit_s: float = CHECK_LIMIT_S) -> None:
        """Check each grammar within ``limit_s`` seconds."""
        self._limit_s = limit_s
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # oldest first
        self._executor = ThreadPoolExecutor(_NUM_CHILDREN, thread_name_prefix="grammar-check")
        self._idle = [
            SandboxedProcess(_HANDLER, _MODULES, {}, limit_s=limit_s) for _ in range(_NUM_CHILDREN)
        ]

    async def check(self, grammar: Grammar) -> Refusal | None:
        """Check a grammar; returns None if it can be used."""
        try:
            text = grammar.text.encode()
        except UnicodeEncodeError:
            return Refusal("the text holds a lone surrogate, which is no character", None)
        if len(text) > _MAX_BYTES:
            return Refusal(f"it has {len(text)} bytes; the limit is {_MAX_BYTES}", None)
        key = hashlib.sha256(grammar.kind.encode() + b"\0" + text).digest()
        known = self._verdicts.get(key)
        if known is not None and time.monotonic() < known.valid_until_s:
            self._verdicts.move_to_end(key)
            return known.refusal
        loop = asyncio.get_running_loop()
        try:
            refusal = await loop.run_in_executor(self._executor, self._check_in_process, grammar)
        except OSError:
            return Refusal("compiling it ended its process", None)
        is_timeout = refusal is not None and refusal.code == "grammar_timeout"
        kept_s = _TIMEOUT_KEPT_S if is_timeout else math.inf
        self._verdicts[key] = _Verdict(refusal, time.monotonic() + kept_s)
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > _MAX_CACHED:
            self._verdicts.popitem(last=False)
        return refusal

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._executor.shutdown(cancel_futures=True)
        for process in self._idle:
            process.close()

    def _check_in_process(self, grammar: Grammar) -> Refusal | None:
        process = self._idle.pop()  # the executor has as many threads as there are processes
        try:
            reply = _ask(process, {"kind": grammar.kind, "text": grammar.text})
        except TimeoutError:
            return Refusal(
                f"it could not be compiled within {self._limit_s:g} s", "grammar_timeout"
            )
        finally:
            self._idle.append(process)
        return None if reply.get("ok") else Refusal(reply["message"], reply["code"])


def _ask(process: SandboxedProcess, request: dict[str, str]) -> dict[str, Any]:
    """``process.call``, once more if the process ended: from outside, or by a grammar that will do
    it again."""
    try:
        return process.call(request)
    except TimeoutError:
        raise
    except OSError:
        return process.call(request)
