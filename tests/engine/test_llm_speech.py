"""The offline LLM transcribes as Hugging Face's model does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import LLM
from engine.errors import InvalidParameter
from tests.tiny_audio import RATE, encoded, speech
from tests.tiny_whisper import EOT, Twin
from tests.whisper_prompts import rules_of

MAX_TEXT = 32
CLIPS = [speech(0.9, 1), speech(0.5, 2)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("speech") / "model", max_target_positions=MAX_TEXT)


@pytest.fixture(scope="module")
def llm(twin: Twin) -> Iterator[LLM]:
    with LLM(twin.directory, num_threads=1, use_tqdm=False, dtype="float32") as loaded:
        yield loaded


def test_recordings_are_transcribed_together(twin: Twin, llm: LLM) -> None:
    _, tokens = rules_of(twin.directory)
    earlier = llm.encode(" Ada", add_special_tokens=False)
    sources = [(CLIPS[0], RATE), encoded(CLIPS[1])]
    found = llm.transcribe(sources, language="German", prompt="Ada", translate=True)
    prompt = tokens.prompt("de", earlier, translates=True)
    for clip, transcript in zip(CLIPS, found, strict=True):
        ids = [token for token in twin.greedy(clip, prompt, MAX_TEXT - len(prompt)) if token < EOT]
        assert transcript.text == llm.decode(ids).strip()
        assert (transcript.language, transcript.segments) == ("de", [])
    (long,) = llm.transcribe((speech(2.2, 4), RATE), timestamps=True)
    assert long.language in ("en", "de")
    assert long.segments
    assert all(each.start_s <= each.end_s <= 2.2 for each in long.segments)


def test_what_cannot_be_transcribed(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="this model knows de, en"):
        llm.transcribe((CLIPS[0], RATE), language="fr")
    with pytest.raises(InvalidParameter, match="only transcribes"):
        llm.generate("Hi")
    with pytest.raises(InvalidParameter, match=r"is empty|too short"):
        llm.transcribe((CLIPS[0][:0], RATE))
