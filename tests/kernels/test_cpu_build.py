"""Compiling the native kernels: once, however many processes need them at the same time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels.cpu.native import build

# A fake compiler: records its target and creates it empty, after a while.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "$(basename "$2")" >> "$COMPILED"
sleep 0.1
: > "$2"
"""


def test_a_target_that_is_asked_for_is_taken_where_the_processor_is_of_it(monkeypatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_processor_flags", lambda: {"avx2", "fma", "f16c", "avx_vnni"})
    monkeypatch.delenv("QUIRE_CPU_TARGET", raising=False)
    assert build.target_name() == "avx2-vnni"
    monkeypatch.setenv("QUIRE_CPU_TARGET", "avx2")
    assert build.target_name() == "avx2"
    monkeypatch.setenv("QUIRE_CPU_TARGET", "avx512")
    with pytest.raises(build.BuildError, match="the processor lacks avx512f, avx512bw"):
        build.target_name()
    monkeypatch.setenv("QUIRE_CPU_TARGET", "avx-2")
    with pytest.raises(
        build.BuildError, match="'avx-2', and known here are: avx512, avx2-vnni, avx2"
    ):
        build.target_name()


def test_engines_that_start_together_compile_once(tmp_path: Path) -> None:
    try:
        target = build._select_target()
    except build.BuildError as error:
        pytest.skip(str(error))
    if (build._HERE / build._library_name(target)).is_file():
        pytest.skip("the library lies beside its sources here")
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    compiled = tmp_path / "compiled"
    env = {
        **os.environ,
        "PATH": f"{compiler.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "COMPILED": str(compiled),
    }
    command = [sys.executable, "-m", "kernels.cpu.native.build"]
    starts = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    names = {start.communicate()[0] for start in starts}
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert names == {f"{build._library_name(target)}\n"}
    made = Counter(compiled.read_text().split())
    assert set(made.values()) == {1}, made
    assert len(made) == len(build._sources(target, ".cpp")) + 1


@pytest.mark.parametrize(
    ("machine", "features", "name"),
    [
        ("x86_64", {"avx2", "fma", "f16c", "sse2"}, "avx2"),
        ("x86_64", {"avx2", "fma", "f16c", "avx_vnni"}, "avx2-vnni"),
        ("aarch64", {"fp", "asimd"}, "neon"),
        ("aarch64", {"fp", "asimd", "asimddp", "sve"}, "neon-dotprod"),
    ],
)
def test_the_kind_of_a_processor(
    machine: str, features: set[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_CPU_TARGET", raising=False)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_processor_flags", lambda: features)
    target = build._select_target()
    assert target.name == name
    others = [other for other in build._TARGETS if other is not target]
    assert build._library_name(target) not in {build._library_name(other) for other in others}


@pytest.mark.parametrize(
    "target",
    [target for target in build._TARGETS if target.machine == platform.machine()],
    ids=lambda target: target.name,
)
def test_the_tiles_compile_for_every_kind_of_processor(target: build._Target) -> None:
    # An image brings the libraries of all of them along, and most are not used on this machine.
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    done = subprocess.run(
        (compiler, *build._flags(target), "-fsyntax-only", "-x", "c++", "-"),
        input="\n".join(f'#include "{name}.h"' for name in ("dense", "int8", "int4", "codes")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (
            "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma\nbugs\t\t: \n",
            {"fpu", "avx2", "fma"},
        ),
        ("BogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp\n", {"fp", "asimd", "asimddp"}),
        ("processor\t: 0\n", set()),
    ],
)
def test_what_a_processor_can_do(
    told: str, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: told)
    assert build._processor_flags() == found
