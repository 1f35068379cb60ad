"""Reference kernels of stateful layers, compared with Hugging Face's torch code.

Also, a text split into steps gives the same result as in one step.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.bamba import modeling_bamba
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from tests.kernels.recurrent_cases import (
    LINES,
    Case,
    conv_case,
    delta_case,
    run_on_trial,
    run_steps,
    scan_case,
    step_rows,
)

DELTA = GatedDeltaShape(2, 4, 8, 6, allows_negative=True)
SCAN = ScanShape(4, 2, 6, 8, (0.01, 2.0))


CASES = [
    delta_case(DELTA, torch.bfloat16),
    scan_case(SCAN, torch.bfloat16),
    conv_case(10, 4, torch.bfloat16, "silu", True),
    conv_case(10, 3, torch.float32, "gated", False),
    conv_case(10, 2, torch.float32, "plain", False),
]


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_the_same_however_it_is_cut(case: Case) -> None:
    """A row that starts at 0 sees nothing of its slot's previous user."""
    whole, last = run_steps(case, reference, [[(2, 0, 9)], [(5, 0, 7)]])
    cut, state = run_steps(
        case,
        reference,
        [[(5, 0, 1), (2, 0, 4)], [(2, 4, 1), (5, 1, 5)], [(5, 6, 1)], [(2, 5, 4), (6, -1, 1)]],
    )
    for place, expected in whole.items():
        torch.testing.assert_close(cut[place], expected)
    torch.testing.assert_close(state, last)
    untouched = [line for line in range(LINES) if line not in (2, 5)]  # nor by padding
    assert torch.equal(state[untouched], case.state[untouched])


@pytest.mark.parametrize("case", CASES)
def test_tokens_on_trial_leave_nothing_but_what_stays(case: Case) -> None:
    tried = [(2, 3, 4, 1), (5, 1, 5, 5), (0, 9, 2, 2), (3, 2, 3, 2)]
    found, state = run_on_trial(case, reference, tried)
    whole = [[(slot, 0, before + count) for slot, before, count, _ in tried]]
    expected, _ = run_steps(case, reference, whole)
    for place, value in expected.items():
        torch.testing.assert_close(found[place], value)
    stays = [[(slot, 0, before + stay) for slot, before, _, stay in tried]]
    torch.testing.assert_close(state, run_steps(case, reference, stays)[1])


def test_the_gated_delta_rule_is_hugging_faces() -> None:
    shape, n = DELTA, 70
    mixed, gates = torch.randn(n, shape.channels), torch.randn(n, 2 * shape.value_heads)
    log_a, dt_bias = torch.randn(2, shape.value_heads)
    state = torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim)
    rows = step_rows([(0, 0, n)])
    y = reference.gated_delta(mixed, gates, log_a, dt_bias, state, rows, shape)
    q, k, v = mixed.split((16, 16, 24), dim=-1)
    operands = (
        q.view(1, n, 2, 8),
        k.view(1, n, 2, 8),
        v.view(1, n, 4, 6),
        (-log_a.exp() * torch.nn.functional.softplus(gates[:, 4:] + dt_bias))[None],
        2 * gates[None, :, :4].sigmoid(),
    )
    for rule in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        theirs, left = rule(*operands, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(y, theirs[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(state, left, atol=1e-4, rtol=1e-3)


def test_the_scan_is_hugging_faces() -> None:
    shape, n = SCAN, 70
    mixed, steps = torch.randn(n, shape.channels), torch.randn(n, shape.heads)
    log_a, dt_bias, skip = torch.randn(3, shape.heads)
    state = torch.zeros(1, shape.heads, shape.state_size, shape.head_dim)
    rows = step_rows([(0, 0, n)])
    y = reference.selective_scan(mixed, steps, log_a, dt_bias, skip, state, rows, shape)
    x, b, c = mixed.split((24, 16, 16), dim=-1)
    theirs, left = modeling_bamba.mamba2_chunk_scan(
        x.view(1, n, 4, 6),
        steps[None],
        -log_a.exp(),
        b.view(1, n, 2, 8),
        c.view(1, n, 2, 8),
        chunk_size=16,
        D=skip,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=shape.time_step_limit,
        return_final_states=True,
    )
    torch.testing.assert_close(y, theirs[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(state, left.transpose(2, 3), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_is_hugging_faces(width: int, has_bias: bool) -> None:
    x, weight = torch.randn(9, 10), torch.randn(width, 10)
    bias = torch.randn(10) if has_bias else None
    state, rows = torch.randn(1, width - 1, 10), step_rows([(0, 0, 9)])
    y = reference.short_conv(x, weight, bias, state, rows, True)
    theirs = qwen.causal_conv1d_fn(x.T[None], weight.T.contiguous(), bias, activation="silu")
    torch.testing.assert_close(y, theirs[0].T, atol=1e-5, rtol=1e-5)
    assert torch.equal(state[0], x[10 - width :])


def test_the_convolution_between_gates_is_hugging_faces() -> None:
    config = Lfm2Config(hidden_size=10, conv_bias=True, num_hidden_layers=1, layer_types=["conv"])
    layer = modeling_lfm2.Lfm2ShortConv(config, 0).requires_grad_(False)
    x = torch.randn(1, 7, 10)
    width = config.conv_L_cache
    y = reference.gated_conv(
        layer.in_proj(x)[0],
        layer.conv.weight.squeeze(1).T.contiguous(),
        layer.conv.bias,
        torch.randn(1, width - 1, 10),
        step_rows([(0, 0, 7)]),
    )
    torch.testing.assert_close(layer.out_proj(y), layer(x)[0], atol=1e-5, rtol=1e-5)


def test_gated_norms_are_hugging_faces() -> None:
    x, gate, weight = torch.randn(5, 3, 8), torch.randn(5, 24), torch.randn(8)
    behind = qwen.Qwen3NextRMSNormGated(8, eps=1e-3).requires_grad_(False)
    behind.weight.copy_(weight)
    expected = behind(x, gate.view(x.shape)).flatten(1)
    torch.testing.assert_close(reference.gated_rms_norm(x, gate, weight, 1e-3, False), expected)
    ahead = modeling_bamba.BambaRMSNormGated(24, 8, eps=1e-3).requires_grad_(False)
    ahead.weight.copy_(torch.randn(24))
    found = reference.gated_rms_norm(x, gate, ahead.weight.view(3, 8), 1e-3, True)
    torch.testing.assert_close(found, ahead(x.flatten(1), gate))


def test_gates() -> None:
    x, gate = torch.randn(5, 8).bfloat16(), torch.randn(5, 9).bfloat16()
    wide = x.float() * torch.sigmoid(gate[:, 1:].float())
    assert torch.equal(reference.apply_gate(x, gate[:, 1:], "sigmoid"), wide.bfloat16())
    wide *= gate[:, 1:].float()
    torch.testing.assert_close(reference.apply_gate(x, gate[:, 1:], "silu"), wide.bfloat16())
    one = reference.apply_gate(x, gate[:, :1], "sigmoid")
    torch.testing.assert_close(one, (x.float() * torch.sigmoid(gate[:, :1].float())).bfloat16())
    soft = x.float() * torch.log1p(gate[:, 1:].float().exp())
    torch.testing.assert_close(reference.apply_gate(x, gate[:, 1:], "softplus"), soft.bfloat16())
