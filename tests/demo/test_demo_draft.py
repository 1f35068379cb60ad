"""The demo model's draft: small enough, described correctly by its card, made by one command."""

import json
from pathlib import Path

import pytest
import torch

from demo import corpus, draft
from demo.draft_card import card
from demo.evaluate import MODEL
from demo.heldout import PATH
from tools.distill.acceptance import measure

RECORD = json.loads((draft.DRAFT / "distill.json").read_text(encoding="utf-8"))
CONFIG = json.loads((draft.DRAFT / "config.json").read_text(encoding="utf-8"))


def some_questions(path: Path, every: int) -> Path:
    lines = PATH.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[::every]), encoding="utf-8")
    return path


def test_it_fits_in_a_megabyte_and_shares_the_vocabulary() -> None:
    assert sum(path.stat().st_size for path in draft.DRAFT.iterdir()) <= 2**20
    model = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert CONFIG["vocab_size"] == model["vocab_size"]
    assert CONFIG["max_position_embeddings"] == model["max_position_embeddings"]


def test_the_card_is_its_record() -> None:
    assert (draft.DRAFT / "README.md").read_text(encoding="utf-8") == card(RECORD, CONFIG)
    ours, labels = (RECORD[name]["acceptance"]["heldout"] for name in ("distilled", "labels"))
    assert ours["mean_accepted"] >= 2.5
    assert ours["mean_accepted"] > labels["mean_accepted"]
    # Beyond chance if there are enough answers to tell; never worse than chance.
    assert all(told["mean_accepted"] > -2 * told["error"] for told in RECORD["lead"].values())
    assert all(
        RECORD["lead"][stem]["mean_accepted"] > 2 * RECORD["lead"][stem]["error"]
        for stem in ("heldout", "unread")
    )


def test_it_foresees_what_its_record_says(tmp_path: Path) -> None:
    """Its acceptance on every sixth question is not far below the mean over all."""
    questions = some_questions(tmp_path / "some.jsonl", 6)
    found, shared, _ = measure(str(MODEL), str(draft.DRAFT), questions)
    told = RECORD["distilled"]["acceptance"]["heldout"]["mean_accepted"]
    assert found.rounds > 100
    assert found.mean_accepted > told - 0.35
    assert 0.8 < shared < 1


@pytest.mark.slow
def test_one_command_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = corpus.shard
    monkeypatch.setattr(corpus, "shard", lambda index: shard(index, size=12))
    monkeypatch.setattr(draft, "NUM_SHARDS", 2)
    monkeypatch.setattr(draft, "PATH", some_questions(tmp_path / "heldout.jsonl", 100))
    monkeypatch.setattr(draft, "FRESH_PATH", some_questions(tmp_path / "fresh.jsonl", 150))
    threads = torch.get_num_threads()
    record = draft.build(tmp_path / "draft", tmp_path / "work", steps=2)
    torch.set_num_threads(threads)
    assert record["distilled"]["steps"] == record["labels"]["steps"] == 2
    assert record["distilled"]["weights_bytes"] == RECORD["distilled"]["weights_bytes"]
    assert [told["answers"] for told in record["lead"].values()][:2] == [3, 2]
    assert record["lead"]["unread"]["answers"] > 2
    made = {path.name for path in (tmp_path / "draft").iterdir()}
    assert made == {path.name for path in draft.DRAFT.iterdir()}
    config = json.loads((tmp_path / "draft" / "config.json").read_text(encoding="utf-8"))
    assert config == CONFIG
