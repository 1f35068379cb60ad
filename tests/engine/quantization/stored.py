"""Writes matrices by the definition of each format, with their values.

Nothing here is shared with the readers: words are built from Python integers, values from float64.
A writer takes a weight [outputs, inputs] and returns the tensors that replace ``X.weight``, by the
suffix of ``X``, and the dequantised weight.
"""

from __future__ import annotations

import json

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def words_of(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Each row's codes as one long number, the first code lowest, split into words of 32 bits."""
    found = []
    for row in rows:
        number = sum(code << (bits * i) for i, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [number >> (32 * i) & 0xFFFFFFFF for i in range(count)]
        found.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(found, dtype=torch.int32)


def round_to_codes(weight, bits, group_of, scale_dtype, *, symmetric):
    """Unsigned codes and their values, with a scale and a zero for each (output, group)."""
    groups, top, weight = max(group_of) + 1, 2**bits - 1, weight.double()
    scales = torch.zeros(len(weight), groups, dtype=scale_dtype)
    zeros = torch.full((len(weight), groups), 2.0 ** (bits - 1), dtype=torch.float64)
    codes, meant = torch.zeros_like(weight), torch.zeros_like(weight)
    for g in range(groups):
        members = [k for k, of in enumerate(group_of) if of == g]
        own = weight[:, members]
        least, most = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[:, g] = (2 * torch.maximum(-least, most) if symmetric else most - least) / top
        scale = scales[:, g].double()
        if not symmetric:
            zeros[:, g] = torch.round(-least / scale).clamp(0, top)
        zero, scale = zeros[:, g, None], scale[:, None]
        codes[:, members] = (torch.round(own / scale) + zero).clamp(0, top)
        meant[:, members] = (codes[:, members] - zero) * scale
    codes, zeros = codes.int().tolist(), zeros.int().tolist()
    return codes, scales, zeros, meant


def gptq(weight, *, bits=4, group=32, symmetric=False, act_order=False, version=1):
    inputs = weight.shape[1]
    group = inputs if group == -1 else group
    # The order of the inputs is that of their weight, as it would be that of their Hessian.
    order = list(range(inputs))
    if act_order:
        order.sort(key=lambda k: -float(weight[:, k].norm()))
    group_of = [0] * inputs
    for place, k in enumerate(order):
        group_of[k] = place // group
    codes, scales, zeros, meant = round_to_codes(
        weight, bits, group_of, torch.float16, symmetric=symmetric
    )
    less = int(version == 1)
    columns = [[(of[g] - less) % 2**bits for of in zeros] for g in range(len(zeros[0]))]
    stored = {
        ".qweight": words_of(codes, bits).T.contiguous(),
        ".qzeros": words_of(columns, bits),
        ".scales": scales.T.contiguous(),
        ".g_idx": torch.tensor(group_of, dtype=torch.int32),
    }
    return stored, meant


def awq(weight, *, group=32):
    outputs, inputs = weight.shape
    codes, scales, zeros, meant = round_to_codes(
        weight, 4, [k // group for k in range(inputs)], torch.float16, symmetric=False
    )

    def packed(rows: list[list[int]]) -> torch.Tensor:
        """[rows][outputs] -> int32 [rows, outputs / 8]."""
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        mixed = [
            [row[begin + place] for begin in range(0, outputs, 8) for place in order]
            for row in rows
        ]
        return words_of(mixed, 4)

    stored = {
        ".qweight": packed([[codes[n][k] for n in range(outputs)] for k in range(inputs)]),
        ".qzeros": packed([[zeros[n][g] for n in range(outputs)] for g in range(inputs // group)]),
        ".scales": scales.T.contiguous(),
    }
    return stored, meant


def compressed_packed(weight, *, bits=4, group=None, symmetric=True, act_order=False):
    outputs, inputs = weight.shape
    size = group or inputs
    order = sorted(range(inputs), key=lambda k: -float(weight[:, k].norm()))
    group_of = [k // size for k in range(inputs)]
    if act_order:
        for place, k in enumerate(order):
            group_of[k] = place // size
    codes, scales, zeros, meant = round_to_codes(
        weight, bits, group_of, torch.bfloat16, symmetric=symmetric
    )
    stored = {
        ".weight_packed": words_of(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        rows = [[zeros[n][g] for n in range(outputs)] for g in range(len(zeros[0]))]
        stored[".weight_zero_point"] = words_of(rows, bits).T.contiguous()
    if act_order:
        stored[".weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    return stored, meant


def compressed_int8(weight, *, per_tensor=False):
    peak = weight.abs().max() if per_tensor else weight.abs().amax(1, keepdim=True)
    scales = (peak / 127).bfloat16().reshape((1,) if per_tensor else (-1, 1))
    codes = (weight / scales.float()).round().clamp(-128, 127)
    stored = {".weight": codes.to(torch.int8), ".weight_scale": scales}
    return stored, codes.double() * scales.double()


def float8(weight, *, form="channel", name=".weight_scale", block=(16, 32)):
    """Scales for the tensor (a scalar or a single element), for outputs, or for blocks."""
    outputs, inputs = weight.shape
    rows, columns = {"block": block, "channel": (1, inputs)}.get(form, (outputs, inputs))
    down, across = -(-outputs // rows), -(-inputs // columns)
    scales = torch.zeros(down, across)
    codes = torch.zeros(outputs, inputs).to(torch.float8_e4m3fn)
    meant = torch.zeros(outputs, inputs, dtype=torch.float64)
    for i in range(down):
        for j in range(across):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[part] = codes[part].double() * float(scales[i, j])
    shape = {"scalar": (), "one": (1,), "flat": (outputs,)}.get(form, scales.shape)
    if form == "flat":
        return float8_flat(weight, name)
    return {".weight": codes, name: scales.reshape(shape)}, meant


def float8_flat(weight, name):
    stored, meant = float8(weight, form="channel", name=name)
    return {**stored, name: stored[name].flatten()}, meant


def mxfp4(weight):
    """For a single matrix: codes [outputs, groups, 16] and exponents [outputs, groups]."""
    groups = weight.double().unflatten(1, (-1, 32))
    powers = torch.floor(torch.log2(groups.abs().amax(2))) - 2
    scale, levels = torch.exp2(powers)[:, :, None], torch.tensor(E2M1).double()
    chosen = ((groups / scale)[..., None] - levels).abs().argmin(3)
    codes = (chosen[..., ::2] | chosen[..., 1::2] << 4).to(torch.uint8)
    exponents, meant = (powers + 127).to(torch.uint8), (levels[chosen] * scale).flatten(1)
    return codes, exponents, meant


def nvfp4(weight):
    divisor = torch.tensor([448 * 6 / float(weight.abs().max())])
    groups = weight.double().unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 * divisor[0]).to(torch.float8_e4m3fn)
    scale = (scales.double() / divisor.double())[:, :, None]
    levels = torch.tensor(E2M1).double()
    codes = ((groups / scale)[..., None] - levels).abs().argmin(3).to(torch.uint8)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1)
    meant = (levels[codes.int()] * scale).flatten(1)
    stored = {
        ".weight_packed": packed,
        ".weight_scale": scales,
        ".weight_global_scale": divisor,
    }
    return stored, meant


def modelopt_nvfp4(weight):
    stored, meant = nvfp4(weight)
    own = {
        ".weight": stored[".weight_packed"],
        ".weight_scale": stored[".weight_scale"],
        ".weight_scale_2": 1 / stored[".weight_global_scale"][0],
        ".input_scale": torch.tensor(0.25),
    }
    return own, meant


def modelopt_mxfp8(weight):
    groups = weight.double().unflatten(1, (-1, 32))
    powers = torch.floor(torch.log2(groups.abs().amax(2))) - 8
    scale = torch.exp2(powers)[:, :, None]
    codes = (groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    meant = (codes.double() * scale).flatten(1)
    return {".weight": codes.flatten(1), ".weight_scale": (powers + 127).to(torch.uint8)}, meant


def compressed_mxfp4(weight):
    codes, exponents, meant = mxfp4(weight)
    return {".weight_packed": codes.flatten(1), ".weight_scale": exponents}, meant


def nf4(weight, *, block=64, nested=False, storage=torch.uint8):
    """Blocks run along the flattened weight, across the ends of rows."""
    levels = torch.tensor(NF4)
    flat = weight.flatten().double()
    count = -(-len(flat) // block)
    peaks = torch.stack([flat[i * block : (i + 1) * block].abs().max() for i in range(count)])
    peaks = peaks.float()
    extra = {}
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32"}
    state["shape"] = list(weight.shape)
    held = peaks
    if nested:
        offset, size = float(peaks.mean()), 4
        table = torch.linspace(-1, 1, 256)
        nests = -(-count // size)
        tops = torch.stack([(peaks - offset)[i * size :][:size].abs().max() for i in range(nests)])
        spread = (peaks - offset) / tops.repeat_interleave(size)[:count].clamp(min=1e-9)
        held = (spread[:, None] - table).abs().argmin(1).to(torch.uint8)
        peaks = table[held.long()] * tops.repeat_interleave(size)[:count] + offset
        extra = {".weight.nested_absmax": tops, ".weight.nested_quant_map": table}
        state |= {"nested_blocksize": size, "nested_offset": offset, "nested_dtype": "float32"}
    scales = peaks.double().repeat_interleave(block)[: len(flat)]
    codes = ((flat / scales)[:, None] - levels.double()).abs().argmin(1).tolist()
    meant = torch.tensor([NF4[code] for code in codes]).double() * scales
    codes += [0] * (len(codes) % 2)
    data = torch.tensor(
        [codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2)], dtype=torch.uint8
    )
    stored = {
        ".weight": data.view(storage)[:, None],
        ".weight.absmax": held,
        ".weight.quant_map": levels,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
        **extra,
    }
    return stored, meant.view(weight.shape)


# From the paper's appendix.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def bitsandbytes_int8(weight):
    peaks = weight.abs().amax(1)
    codes = (weight * 127 / peaks[:, None]).round()
    stored = {
        ".weight": codes.to(torch.int8),
        ".SCB": peaks,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, codes.double() * peaks.double()[:, None] / 127
