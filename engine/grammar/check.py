"""Checks grammars before anything is promised to a client, with limits on time and memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from engine.sandbox.process import SandboxedProcess
from engine.types import Grammar

CHECK_LIMIT_S = 1.5
_HANDLER = Path(__file__).with_name("check_worker.py")
_MODULES = ("llguidance", "msgspec", "numpy", "engine")
_MAX_BYTES = 512 * 1024  # size limit of a grammar's text
_MAX_CACHED = 20_000
_NUM_CHILDREN = 2  # so that one slow grammar does not block all others


class Refusal(NamedTuple):
    """Why a grammar cannot be used. The message is meant for the client and names no field."""

    message: str
    code: str | None  # "grammar_timeout" if it takes too much time or memory


class GrammarChecker:
    """Checks grammars in killable processes, and caches the results.

    Belongs to one event loop. A cached result is a digest and a verdict: some hundred bytes.
    """

    def __init__(self, *, limit_s: float = CHECK_LIMIT_S) -> None:
        """Check each grammar within ``limit_s`` seconds."""
        self._limit_s = limit_s
        self._verdicts: OrderedDict[bytes, Refusal | None] = OrderedDict()  # oldest first
        self._executor = ThreadPoolExecutor(_NUM_CHILDREN, thread_name_prefix="grammar-check")
        self._idle = [SandboxedProcess(_HANDLER, _MODULES, {}, limit_s=limit_s)]
        self._idle += [
            SandboxedProcess(_HANDLER, _MODULES, {}, limit_s=limit_s)
            for _ in range(_NUM_CHILDREN - 1)
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
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        loop = asyncio.get_running_loop()
        try:
            verdict = await loop.run_in_executor(self._executor, self._check_in_process, grammar)
        except OSError:
            # Perhaps it was not the grammar that ended the process, so this is not remembered.
            return Refusal("compiling it ended its process", None)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MAX_CACHED:
            self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._executor.shutdown(cancel_futures=True)
        for process in self._idle:
            process.close()

    def _check_in_process(self, grammar: Grammar) -> Refusal | None:
        process = self._idle.pop()  # the executor has as many threads as there are processes
        try:
            reply = process.call({"kind": grammar.kind, "text": grammar.text})
        except TimeoutError:
            return Refusal(
                f"it could not be compiled within {self._limit_s:g} s", "grammar_timeout"
            )
        finally:
            self._idle.append(process)
        return None if reply.get("ok") else Refusal(reply["message"], reply["code"])
