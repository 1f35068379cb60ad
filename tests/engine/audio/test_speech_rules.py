"""The rules of transcripts equal Hugging Face's, for any text so far and any logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.audio.languages import code_of, language_name
from engine.audio.speech import SpeechTokens
from engine.sampling.constraint import Constraint
from engine.sampling.timestamps import prefer_timestamps
from engine.types import Request, SamplingParams
from tests import tiny_whisper
from tests.tiny_whisper import (
    EN,
    EOT,
    NO_STAMPS,
    PREV,
    SOT,
    STAMPS,
    TRANSCRIBE,
    TRANSLATE,
    VOCAB,
    Twin,
)

TOKENS = SpeechTokens(
    start=SOT,
    no_timestamps=NO_STAMPS,
    text_end=EOT,
    previous=PREV,
    languages=(("en", EN),),
    transcribe=TRANSCRIBE,
    translate=TRANSLATE,
    suppressed=tiny_whisper.SUPPRESSED,
    begin_suppressed=tiny_whisper.BEGIN_SUPPRESSED,
    max_initial=20,
    max_text=96,
)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("rules") / "model")


def _texts(rng: random.Random) -> list[list[int]]:
    """Texts of letters and timestamps in any order, of lengths from 0."""
    kinds = (lambda: rng.randrange(EOT), lambda: rng.randrange(STAMPS, VOCAB))
    return [[rng.choice(kinds)() for _ in range(length)] for length in range(8) for _ in range(30)]


@pytest.mark.parametrize("stamped", [False, True])
def test_allowed_tokens_and_preferred_timestamps(twin: Twin, stamped: bool) -> None:
    rng = random.Random(3)
    sampling = SamplingParams(speech=TOKENS.rules(has_timestamps=stamped))
    processors = twin.processors(4, stamped=stamped)
    num_due = 0
    for number, text in enumerate(_texts(rng)):
        request = Request(id="a", prompt_token_ids=(1, 2, 3, 4), sampling=sampling)
        assert Constraint.applies_to(request)
        constraint = Constraint(request, text, None, (EOT,), VOCAB)
        line = np.zeros(-(-VOCAB // 32), np.int32)
        constraint.write(line, len(text))
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(number)) * 2
        wanted = logits
        for process in processors:
            wanted = process(torch.tensor([[1, 2, 3, 4, *text]]), wanted)
        allowed = np.unpackbits(line.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        found = logits.masked_fill(~torch.from_numpy(allowed), float("-inf"))
        if constraint.timestamp_begin is not None:
            both = torch.cat((torch.zeros_like(logits), logits))
            mask = torch.from_numpy(line)[None]
            prefer_timestamps(both, torch.tensor([1]), constraint.timestamp_begin, mask)
            assert not both[0].any()  # another row
            num_due += int((both[1:].isinf() & ~found.isinf()).any())
            found = both[1:]
        assert torch.equal(found, wanted), text
    assert num_due > 20 or not stamped


def test_prompts() -> None:
    assert TOKENS.prompt("en") == [SOT, EN, TRANSCRIBE, NO_STAMPS]
    assert TOKENS.prompt("en", translates=True, has_timestamps=True) == [SOT, EN, TRANSLATE]
    long = list(range(60))
    assert TOKENS.prompt("en", long) == [PREV, *long[-47:], SOT, EN, TRANSCRIBE, NO_STAMPS]
    english = SpeechTokens(start=SOT, no_timestamps=NO_STAMPS, text_end=EOT, max_text=96)
    assert english.prompt(None, [5]) == [SOT, NO_STAMPS]


def test_languages_have_names_and_codes() -> None:
    assert language_name("de") == "german"
    assert language_name("xx") == "xx"
    assert [code_of(given) for given in ("German", "DE", "de-AT", "haitian creole", "xx")] == [
        *("de", "de", "de", "ht", "xx")
    ]


@pytest.mark.parametrize(("remove", "change", "problem"), [
    ((), {"no_timestamps_token_id": VOCAB}, "which is no token"),
    ((), {"suppress_tokens": [-1]}, "which is no token"),
    ((), {"lang_to_id": [1]}, "is no object"),
    ((), {"max_initial_timestamp_index": "x"}, "is no number of steps"),
    (("no_timestamps_token_id",), {}, None),  # the tokenizer has it
    (("prev_sot_token_id", "lang_to_id"), {}, None),
])  # fmt: skip
def test_special_tokens_come_from_several_files(
    twin: Twin, tmp_path: Path, remove: tuple[str, ...], change: dict[str, Any], problem: str | None
) -> None:
    import json

    from engine.models.checkpoint import read_config

    for file in twin.directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "generation_config.json"
    settings = json.loads(path.read_text()) | change
    path.unlink()
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in remove}))
    config = read_config(str(tmp_path))
    if problem is not None:
        assert config.audio is None
        assert problem in str(config.audio_unsupported_reason)
        return
    assert config.audio is not None
    tokens = config.audio.rules.transcription.speech
    assert tokens is not None
    assert (tokens.no_timestamps, tokens.previous) == (NO_STAMPS, PREV)
    if "lang_to_id" in remove:  # a model of English alone
        assert (tokens.languages, tokens.translate) == ((), None)
