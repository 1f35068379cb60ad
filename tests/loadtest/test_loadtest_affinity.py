"""The savings of prefix routing on real servers, compared with a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import affinity


@pytest.mark.slow
def test_prompt_tokens_are_counted_as_worked_out_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two conversations, one after the other, with a common prefix of 64 tokens.

    Each has three prompts of 96, 128 and 160 tokens.
    """
    out = tmp_path / "results" / "affinity.json"
    load = {"conversations": 2, "turns": 3, "in_flight": 1, "system_prompts": 1}
    load |= {"system_len": 64, "turn_len": 32, "output_len": 4}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in load.items()]
    serve = ["--load-format", "stub", "--block-size", "16", "--num-threads", "1"]
    assert affinity.main([*flags, "--out", str(out), "--", *serve]) == 0
    table, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    result = json.loads(line)
    assert json.loads(out.read_text()) == result
    # One server computes 96, 32, 32, and 32 for each prompt of the second conversation.
    assert result["routed"] == {"sent": 768, "computed": 256}
    # In turn: 96, 128, 64 (the first 96 are cached); 32 (64 are), 64, 64 (the first 96 are).
    assert result["in_turn"] == {"sent": 768, "computed": 448}
    assert result["load"] == load
    assert (result["engines"], result["server"]) == (2, serve)
    assert "256 of 768 prompt tokens computed: 33.3%" in table
