"""The compiled inner loops keep their sums in registers: most in products, all for states.

A compiler that keeps them in memory gives right results, but at half the speed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from kernels.cpu.native import build
from tests.kernels import cpu_targets

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\s+(.+)$")
JUMP = re.compile(r"j\w+ +([0-9a-f]+)\b")
SUM = re.compile(r"vfmadd\d+ps")
# Multiply instructions, by target.
PRODUCTS = {
    "avx512": re.compile(r"vpdpbusd|vdpbf16ps"),
    "avx2": re.compile(r"vfmadd\d+ps|vpmaddubsw"),
    "avx2-vnni": re.compile(r"vfmadd\d+ps|vpdpbusd"),
}
# Without AVX-512: the tiles of linear layers, and those of prompt attention.
PRODUCT_OF = re.compile(r"DenseProducts|Int8Products|Int4Rows|multiply_tile")
STORE_TO_STACK = re.compile(r"vmov\w+ +%[yz]mm\d+,.*\(%r[sb]p")


def functions(listing: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Each function's name, and its instructions with their addresses."""
    name, body = "", []
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            yield name, body
            name, body = found[1], []
        elif found := INSTRUCTION.match(line):
            body.append((int(found[1], 16), found[2]))
    yield name, body


def inner_loops(body: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The instructions from a backward jump's target to the jump, without any other jump."""
    places = {address: i for i, (address, _) in enumerate(body)}
    for end, (_, instruction) in enumerate(body):
        found = JUMP.match(instruction)
        begin = places.get(int(found[1], 16), end) if found else end
        loop = [text for _, text in body[begin:end]]
        if loop and not any(JUMP.match(text) for text in loop):
            yield loop


def count(pattern: re.Pattern[str], loop: list[str]) -> int:
    return sum(bool(pattern.match(text)) for text in loop)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no disassembler")
@pytest.mark.parametrize("target", cpu_targets.slow_unless_own(PRODUCTS))
def test_sums_stay_in_registers(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_TARGET", target)
    try:
        library = str(build.library_path())
    except build.BuildError as error:
        pytest.skip(str(error))
    command = ["objdump", "-d", "--no-show-raw-insn", library]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen, spilled, of_states, of_attention = 0, {}, 0, 0
    for name, body in functions(listing):
        if "pass_over" in name:
            loops = (loop for loop in inner_loops(body) if count(SUM, loop) >= 8)
            of_states += sum(not count(STORE_TO_STACK, loop) for loop in loops)
        if target != "avx512" and not PRODUCT_OF.search(name):
            continue
        for loop in inner_loops(body):
            products = count(PRODUCTS[target], loop)
            if products >= 8:  # for a tile of four rows or more
                seen += 1
                of_attention += "multiply_tile" in name
                if count(STORE_TO_STACK, loop) > products // 4:
                    spilled[name] = loop
    assert seen > (20 if target == "avx512" else 5)
    assert of_states == 3  # the delta rule, with a decay per channel as well, and the scan
    assert of_attention or target == "avx512"  # which multiplies pairs of bfloat16
    assert not spilled
