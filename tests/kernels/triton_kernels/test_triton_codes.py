"""Inline PTX that dequantises codes, evaluated here since the interpreter cannot run it."""

from __future__ import annotations

import re
import struct

import pytest
import torch

pytest.importorskip("triton")

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS
from kernels.triton.code_pairs import PAIR_FACTORS, PAIR_INSTRUCTIONS, PAIR_OFFSETS
from kernels.triton.codes import DECODE_FACTORS, DECODE_OFFSETS, INSTRUCTIONS

_LINE = re.compile(r"^\s*([a-z]+)\.(?:b32|u32)\s+(.+);$")
_WORD = 2**32 - 1


def run(code: str, word: int, num_outputs: int) -> list[int]:
    """A thread's registers after the instructions; the word follows the outputs.

    Semantics: PTX ISA, "Integer Arithmetic", "Logic and Shift", "prmt".
    """
    registers = {f"${num_outputs}": word}

    def value(operand: str) -> int:
        return int(operand, 0) if operand[0].isdigit() else registers[operand]

    for line in code.strip().strip("{}").splitlines():
        if not line.strip() or ".reg" in line:
            continue
        found = _LINE.match(line)
        assert found, line
        target, *operands = (part.strip() for part in found[2].split(","))
        registers[target] = _DO[found[1]](*map(value, operands)) & _WORD
    return [registers[f"${i}"] for i in range(num_outputs)]


def permute(low: int, high: int, selector: int) -> int:
    parts = (high << 32 | low).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8, "signs are replicated"
    return int.from_bytes(bytes(parts[i] for i in chosen), "little")


_DO = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "prmt": permute,
}


def levels_of(kind: str, half: int, held: bytes) -> list[float]:
    """The format's levels by definition."""
    if kind == "int8":
        return [float(byte - 256 if byte > 127 else byte) for byte in held]
    if kind == "e4m3":
        bits = torch.tensor(list(held), dtype=torch.uint8)
        return bits.view(torch.float8_e4m3fn).float().tolist()
    table = INT4_LEVELS if kind == "int4" else MXFP4_LEVELS
    return [table[byte >> 4 * half & 15] for byte in held]


@pytest.mark.parametrize(("kind", "half"), INSTRUCTIONS)
def test_instructions_widen_every_code_in_every_place(kind: str, half: int) -> None:
    # e4m3 has two nan codes, which no checkpoint contains.
    known = [byte for byte in range(256) if kind != "e4m3" or byte & 0x7F != 0x7F]
    taken_off = 2.0**23 + 128 if kind == "int8" else DECODE_OFFSETS.get(kind, 0.0)
    for byte in known:
        held = bytes((byte, known[byte // 3], known[-1 - byte // 2], byte))
        if kind in DECODE_FACTORS:
            words = run(INSTRUCTIONS[kind, half], int.from_bytes(held, "little"), 2)
            floats = [x for word in words for x in struct.unpack("<2e", struct.pack("<I", word))]
        else:
            words = run(INSTRUCTIONS[kind, half], int.from_bytes(held, "little"), 4)
            floats = [struct.unpack("<f", struct.pack("<I", word))[0] for word in words]
        made = [(x - taken_off) * DECODE_FACTORS.get(kind, 1.0) for x in floats]
        assert made == levels_of(kind, half, held)


@pytest.mark.parametrize(("kind", "dtype", "half"), PAIR_INSTRUCTIONS)
def test_instructions_widen_every_code_to_pairs(kind: str, dtype: str, half: int) -> None:
    known = [byte for byte in range(256) if kind != "e4m3" or byte & 0x7F != 0x7F]
    form = torch.bfloat16 if dtype == "bf16" else torch.float16
    offset, factor = PAIR_OFFSETS.get((kind, dtype), 0.0), PAIR_FACTORS.get((kind, dtype), 1.0)
    for byte in known:
        held = bytes((byte, known[byte // 3], known[-1 - byte // 2], byte))
        code = PAIR_INSTRUCTIONS[kind, dtype, half]
        words = run(code, int.from_bytes(held, "little"), 2)
        floats = torch.frombuffer(bytearray(struct.pack("<2I", *words)), dtype=form).tolist()
        assert [(x - offset) * factor for x in floats] == levels_of(kind, half, held)
