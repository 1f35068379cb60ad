"""Sixteen lanes do what loops over sixteen values do, in the registers of each kind of processor.

NEON is tested on its own processors, and elsewhere where Debian's g++-aarch64-linux-gnu and
qemu-user are installed.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.native import build

SOURCE = Path(__file__).with_name("lanes.cpp")
TARGETS = {target.name: target for target in build._TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_lanes(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    compiler, emulator = "g++", []
    if target.machine != platform.machine():
        compiler, emulator = f"{target.machine}-linux-gnu-g++", [f"qemu-{target.machine}"]
    elif not build._processor_flags().issuperset(target.required_features):
        pytest.skip(f"the processor lacks what {name} needs")
    if any(shutil.which(program) is None for program in (compiler, *emulator)):
        pytest.skip(f"neither {target.machine} nor what emulates it")
    folders = (build._HERE, *(build._HERE / folder for folder in target.folders))
    made = tmp_path / "lanes"
    flags = [flag for flag in (*build._FLAGS, *target.flags) if flag not in ("-O3", "-fPIC")]
    includes = [f"-I{folder}" for folder in folders]
    command = [compiler, *flags, "-O1", "-static", *includes, str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True)
    done = subprocess.run([*emulator, str(made)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
