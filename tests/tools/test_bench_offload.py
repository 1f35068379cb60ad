"""The benchmark of the host tier, on loads that take a moment."""

from __future__ import annotations

import json

import pytest

from engine.paths import default_model_dir
from tools.bench import offload


@pytest.mark.slow
def test_a_tier_computes_less(capsys):
    assert offload.main([str(default_model_dir()), "--tiny", "--rounds", "1"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [row["case"] for row in told] == ["preempted", "displaced", "prefixes"]
    for row in told:
        without, tier = row["recompute"], row["tier"]
        assert tier["computed"] < without["computed"]
        assert tier["blocks_loaded"] > 0 == without["blocks_loaded"]
        if row["case"] == "prefixes":
            assert tier["prompt_tokens_found"] > without["prompt_tokens_found"]
        else:
            assert tier["recomputed"] < without["recomputed"]
        assert row["speed"] > 0
