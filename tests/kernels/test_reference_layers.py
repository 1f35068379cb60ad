"""The element-wise kernels, compared with float64."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.layers import rms_norm, rope, rope_tables, silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 32), (7, 3, 16)])
def test_rms_norm(dtype, shape):
    x = torch.randn(shape).mul_(3).to(dtype)
    weight = torch.randn(shape[1:] if len(shape) == 3 else shape[-1:]).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    actual = rms_norm(x, weight, 1e-3)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def test_silu_mul():
    gate, up = torch.randn(6, 10), torch.randn(6, 10)
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    actual = silu_mul(torch.cat((gate, up), dim=1))
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-6)


def test_rope_turns_each_pair_by_its_angle():
    """As a complex product: (x1 + i x2) * scale * exp(i * position * frequency)."""
    frequencies = torch.rand(4)
    positions = torch.tensor([0, 1, 17, 300])
    x = torch.randn(4, 3, 8)
    cos, sin = rope_tables(positions, frequencies, 1.5)
    turned = rope(x, cos, sin)
    angles = positions.double()[:, None, None] * frequencies.double()
    expected = torch.complex(x[..., :4].double(), x[..., 4:].double()) * 1.5
    expected = expected * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((expected.real, expected.imag), dim=-1)
    torch.testing.assert_close(turned.double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(turned[0], x[0] * 1.5)
