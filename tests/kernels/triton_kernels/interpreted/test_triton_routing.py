"""The experts of each token, and the tokens of each expert, compared with plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import RoutingRule
from kernels.reference import moe as reference
from kernels.triton.routing import route, select_experts, sort_pairs

_RULES = {
    "qwen3": RoutingRule(8),
    "qwen2": RoutingRule(4, normalised=False),
    "llama4": RoutingRule(1, scoring="sigmoid", normalised=False),
    "deepseek-v2": RoutingRule(6, normalised=False, scale=16.0, num_groups=8, top_groups=3),
    "deepseek-v3": RoutingRule(
        8, scoring="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_best=2
    ),
    "kolibri": RoutingRule(6, scoring="late_sigmoid"),
    "phi-3.5-moe": RoutingRule(2, "sparse_mixer", normalised=False, margin=0.5),
    "three groups": RoutingRule(3, num_groups=3, top_groups=2, group_best=2),
}


@pytest.mark.parametrize("tokens", [0, 1, 3, 7])
@pytest.mark.parametrize("name", _RULES)
def test_choices_equal_the_twins(name: str, tokens: int) -> None:
    rule, random = _RULES[name], torch.Generator().manual_seed(tokens)
    num_experts = 60 if name == "three groups" else 64
    x, weight = (torch.randn(n, 48, generator=random) for n in (tokens, num_experts))
    x /= 8  # the sigmoid of larger numbers is often 1
    bias, correction = (torch.randn(num_experts, generator=random) / 4 for _ in range(2))
    for of_router, of_choice in ((None, None), (bias, None), (bias, correction)):
        if of_choice is not None and rule.scoring == "sparse_mixer":
            continue
        said = x, weight, of_router, of_choice, rule
        (ids, shares), (expected_ids, expected) = route(*said), reference.route(*said)
        assert ids.dtype == torch.int64
        assert shares.dtype == torch.float32
        order, expected_order = ids.argsort(dim=1), expected_ids.argsort(dim=1)
        assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
        torch.testing.assert_close(
            shares.gather(1, order), expected.gather(1, expected_order), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_scores_choose_the_first_experts(dtype: torch.dtype) -> None:
    ids, shares = select_experts(torch.zeros(2, 12, dtype=dtype), None, RoutingRule(5), 12)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(shares, torch.full((2, 5), 0.2))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", _RULES)
def test_what_is_no_number_chooses_experts_that_there_are(name: str) -> None:
    """Otherwise a later kernel would read out of bounds, and every request would fail."""
    said = torch.zeros(3, 60)
    said[0] = float("nan")
    said[1, 7] = float("nan")
    said[2, 11] = float("inf")
    ids, shares = select_experts(said, None, _RULES[name], 60)
    assert ((ids >= 0) & (ids < 60)).all()
    assert shares[0].isnan().all(), "a request that went wrong has to show it"


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(0, 2, 4), (1, 8, 128), (5, 2, 3), (40, 1, 1), (300, 8, 200), (3000, 2, 2)],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_pairs_are_listed_by_expert(tokens: int, top_k: int, experts: int, elsewhere: bool) -> None:
    random = torch.Generator().manual_seed(experts)
    ids = torch.randint(0, experts + elsewhere, (tokens, top_k), generator=random)
    made = sort_pairs(ids, experts, has_remote_pairs=elsewhere)
    owners, pairs = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(owners, torch.arange(experts + 1))
    assert made.starts.tolist() == starts.tolist()
    assert made.pairs[: starts[-1]].tolist() == pairs[: starts[-1]].tolist()
    tiles = -(-starts.diff() // made.rows)
    assert made.tile_starts.tolist() == [0, *tiles.cumsum(0).tolist()]
    assert made.tile_starts[-1] <= made.num_tiles
