"""The C++ kernels of this folder as one library: found ready, or compiled on first use.

    python -m kernels.cpu.native.build      compiles it into this folder, for an image or a wheel

A library is named by a hash of its sources and flags, so a stale one is never loaded. It is looked
for in this folder, then in the user's cache folder; where it is in neither, it is compiled into the
latter, which takes about two seconds once. Nothing here is required: where the processor or the
compiler is missing, ``load`` says why in the log and other code serves.

The library shares the threads of torch: both link to libgomp by the same name, and torch, which
comes with one, is imported first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_NEEDS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "fma")
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp"),
    *(f"-m{name.replace('avx512_', 'avx512')}" for name in _NEEDS),
)
_COMPILERS = ("g++", "c++")
_COMPILE_TIMEOUT_S = 120


class BuildError(Exception):
    """The library cannot be had here; the message says why in one line."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where it cannot be had; the reason is logged once."""
    import torch  # its libgomp must be the first  # noqa: F401

    try:
        return ctypes.CDLL(str(library()))
    except (BuildError, OSError) as error:
        logger.info("no native CPU kernels: %s", error)
        return None


def library() -> Path:
    """Where the library lies; compiled first if need be.

    Raises:
        BuildError: the processor lacks what the kernels are made of, or they cannot be compiled.
    """
    if missing := _missing():
        raise BuildError(f"the processor lacks {', '.join(missing)}")
    name = _name()
    for folder in (_HERE, cache_dir()):
        if (folder / name).is_file():
            return folder / name
    try:
        return compile_into(cache_dir())
    except OSError:  # no home, or it cannot be written: again at each start
        return compile_into(Path(tempfile.mkdtemp(prefix="quire-")))


def compile_into(folder: Path) -> Path:
    """Compile the library into a folder.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)}) to build them with")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / _name()
    # Made aside and moved when whole: others may build or load the same at this moment.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [f"{scratch}/{source.stem}.o" for source in _sources(".cpp")]
        compiles = [
            (compiler, *_FLAGS, "-c", str(source), "-o", made)
            for source, made in zip(_sources(".cpp"), objects, strict=True)
        ]
        _run(compiles)
        whole = f"{scratch}/{target.name}"
        _run([(compiler, "-shared", "-fopenmp", *objects, "-o", whole)])
        os.replace(whole, target)
    return target


def cache_dir() -> Path:
    """The folder in which this user's builds are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "quire"


def _run(commands: list[tuple[str, ...]]) -> None:
    """Run them side by side; the first that fails is told."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for process in running:
            _, complaint = process.communicate(timeout=_COMPILE_TIMEOUT_S)
            if process.returncode != 0:
                told = next((line for line in complaint.splitlines() if "error" in line), "")
                raise BuildError(f"the C++ compiler failed: {told.strip()[:200]}")
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler ran for {_COMPILE_TIMEOUT_S} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in suffixes)


def _name() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in _sources(".cpp", ".h"):
        digest.update(source.read_bytes())
    return f"libquire-{digest.hexdigest()[:16]}.so"


def _missing() -> list[str]:
    """What the processor lacks of what the kernels need."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ["x86-64 under Linux"]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return [name for name in _NEEDS if name not in flags]


def main() -> int:
    """Compile into this folder, whatever processor this machine has."""
    try:
        print(compile_into(_HERE).name)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
