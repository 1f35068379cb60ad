"""The C++ kernels of this folder as one library: found ready, or compiled on first use.

    python -m kernels.cpu.native.build           compiles it into the user's cache folder
    python -m kernels.cpu.native.build --here    into this folder, for an image or a wheel

There are several targets, kinds of processor (``_TARGETS``). Attention, norms and sampling are
written for all of them; linear layers are in ``panels/``, with tiles in ``avx512/`` and, for
processors that multiply in float32, in ``vectors/``. The first target that this machine supports is
used, or the one named by QUIRE_CPU_TARGET, for comparisons and debugging.

A library's name has a hash of its sources and flags, so a stale one is never loaded. It is searched
for in this folder, then in the user's cache folder; if it is in neither, it is compiled into the
latter, which takes some seconds once. Nothing here is required: without a suitable processor or a
compiler, ``load`` logs the reason, and other kernels are used.

The library has its own team of threads (``team.h``), as large as torch's. It asks torch's libgomp
for that number, so torch is imported first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_COMPILERS = ("g++", "c++")
_COMPILE_TIMEOUT_S = 600
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp"),
    # The code uses neither errno nor traps; vectors wider than the processor's are split.
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)


class _Target(NamedTuple):
    """A kind of processor that the library is compiled for."""

    name: str  # value of QUIRE_CPU_TARGET
    machine: str  # as platform.machine() names it
    required_features: tuple[str, ...]  # as /proc/cpuinfo names them
    folders: tuple[str, ...]  # sources for it, in addition to this folder's

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags for the instruction set."""
        return tuple(
            _COMPILER_FLAGS.get(name, f"-m{name.replace('_', '')}")
            for name in self.required_features
        )


_COMPILER_FLAGS = {"asimddp": "-march=armv8.2-a+dotprod"}  # if it differs from the name
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "fma")
_AVX2 = ("avx2", "fma", "f16c")
# In order of preference.
_TARGETS = (
    _Target("avx512", "x86_64", _AVX512, ("panels", "avx512")),
    _Target("avx2-vnni", "x86_64", (*_AVX2, "avx_vnni"), ("panels", "vectors")),
    _Target("avx2", "x86_64", _AVX2, ("panels", "vectors")),
    _Target("neon-dotprod", "aarch64", ("asimddp",), ("panels", "vectors")),
    _Target("neon", "aarch64", (), ("panels", "vectors")),
)


class BuildError(Exception):
    """The library is not available; the message gives the reason in one line."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None if it is not available; the reason is logged once."""
    try:
        return open_library()
    except BuildError as error:
        logger.info("no native CPU kernels: %s", error)
        return None


@functools.cache
def open_library() -> ctypes.CDLL:
    """Return the library.

    Raises:
        BuildError: it is not available; the message gives the reason.
    """
    import torch  # its libgomp must be the first  # noqa: F401

    try:
        return ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise BuildError(str(error)) from None


def target_name() -> str:
    """Return the name of the library's target.

    Raises:
        BuildError: as ``library_path``.
    """
    return _select_target().name


def library_path() -> Path:
    """Return the path of the library, compiling it if necessary.

    Raises:
        BuildError: the processor lacks required instructions, or the compilation fails.
    """
    target = _select_target()
    if found := _find(target):
        return found
    try:
        with _exclusive_lock(
            cache_dir()
        ):  # engines and ranks that start meanwhile wait and find it
            return _find(target) or compile_into(cache_dir(), target)
    except OSError:  # no writable home: compiled at each start
        return compile_into(Path(tempfile.mkdtemp(prefix="quire-")), target)


def compile_into(folder: Path, target: _Target) -> Path:
    """Compile the library into a folder.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder is not writable.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)}) to build them with")
    logger.info("compiling the native CPU kernels; this happens once and takes some seconds")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = folder / _library_name(target)
    # Built aside and moved when complete: other processes may build or load the same one now.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = _sources(target, ".cpp")
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        _run(
            [
                (compiler, *_flags(target), "-c", str(source), "-o", compiled)
                for source, compiled in zip(sources, objects, strict=True)
            ]
        )
        whole = f"{scratch}/{made.name}"
        _run([(compiler, "-shared", "-fopenmp", *objects, "-o", whole)])
        if _library_name(target) != made.name:  # the sources have changed meanwhile
            return compile_into(folder, target)
        os.replace(whole, made)
    return made


def cache_dir() -> Path:
    """Return this user's folder of builds; one in the root directory for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "quire")
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return home / ".cache" / "quire"


def _flags(target: _Target) -> tuple[str, ...]:
    folders = (_HERE, *map(_HERE.joinpath, target.folders))
    return (*_FLAGS, *target.flags, *(f"-I{folder}" for folder in folders))


def _find(target: _Target) -> Path | None:
    made = (folder / _library_name(target) for folder in (_HERE, cache_dir()))
    return next((path for path in made if path.is_file()), None)


@contextlib.contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Exclude other processes. The lock is released when its holder dies."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # as on some network file systems; all then compile
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(commands: list[tuple[str, ...]]) -> None:
    """Run commands in parallel, at most one per core: a compiler takes hundreds of megabytes.

    The first failure is raised.
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for _ in pool.map(_run_one, commands):
            pass  # raises its failure; those not begun are skipped


def _run_one(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler ran for {_COMPILE_TIMEOUT_S} s") from None
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "")
        raise BuildError(f"the C++ compiler failed: {reason.strip()[:200]}")


def _sources(target: _Target, *suffixes: str) -> list[Path]:
    folders = (_HERE, *(_HERE / name for name in target.folders))
    found = (path for folder in folders for path in folder.iterdir() if path.suffix in suffixes)
    return sorted(found)


def _library_name(target: _Target) -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *target.flags)).encode())
    for source in _sources(target, ".cpp", ".h"):
        digest.update(source.read_bytes())
    return f"libquire-{target.machine}-{digest.hexdigest()[:16]}.so"


def _select_target() -> _Target:
    """Return the first target that this machine supports, or the one that QUIRE_CPU_TARGET names.

    Raises:
        BuildError: it supports none, or not that one.
    """
    if sys.platform != "linux":
        raise BuildError("they are made for Linux")
    flags = _processor_flags()
    known = [target for target in _TARGETS if target.machine == platform.machine()]
    if asked := os.environ.get("QUIRE_CPU_TARGET"):
        names = ", ".join(target.name for target in known)
        known = [target for target in known if target.name == asked]
        if not known:
            raise BuildError(f"QUIRE_CPU_TARGET is {asked[:40]!r}, and known here are: {names}")
    for target in known:
        if flags.issuperset(target.required_features):
            return target
    lacking = [
        name for target in known[-1:] for name in target.required_features if name not in flags
    ]
    raise BuildError(f"the processor lacks {', '.join(lacking) or 'a kernel of its kind'}")


def _processor_flags() -> set[str]:
    """Return the capabilities of the first processor: flags on x86, features on aarch64."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def main(arguments: Sequence[str]) -> int:
    """Compile into the cache for this machine, or into this folder for its whole family."""
    try:
        if "--here" in arguments:
            for target in _TARGETS:
                if target.machine == platform.machine():
                    print(compile_into(_HERE, target).name)
        else:
            print(library_path().name)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
