"""The offline LLM gives Hugging Face's answers to conversations with audio."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from tests.tiny_audio import AUDIO, KINDS, RATE, encoded, speech
from tests.tiny_audio_twin import AudioTwin

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "use_tqdm": False, "dtype": "float32"}
PLACE = {"type": "audio"}


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AudioTwin:
    return AudioTwin(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def llm(twin: AudioTwin) -> Iterator[LLM]:
    with LLM(twin.directory, **OPTIONS) as loaded:
        yield loaded


def conversation(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": shown}]


def test_what_is_said_of_audio_is_what_hugging_face_says(
    twin: AudioTwin, llm: LLM, tmp_path: Path
) -> None:
    clips = [speech(0.8, 1), speech(0.8, 2)]
    file = tmp_path / "one.wav"
    file.write_bytes(encoded(clips[0]))
    url = "data:audio/wav;base64," + base64.b64encode(encoded(clips[0])).decode()
    data = {"data": base64.b64encode(encoded(clips[1])).decode(), "format": "wav"}
    if twin.kind == "qwen3_asr":  # its processor takes one
        asked = conversation("What?", {"type": "audio", "audio": str(file)})
        (result,) = llm.chat(asked, GREEDY)
        wanted = twin.answer(conversation("What?", PLACE), clips[:1], 8)
        assert list(result.outputs[0].token_ids) == wanted
        return
    wanted = twin.answer(conversation("What?", PLACE, " or ", PLACE), clips, 8)
    spellings: list[tuple[Any, Any]] = [
        ({"type": "audio", "audio": (clips[0], RATE)}, {"type": "audio", "audio": data}),
        ({"type": "audio", "path": str(file)}, {"type": "audio", "audio": encoded(clips[1])}),
        (
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "input_audio", "input_audio": data},
        ),
    ]
    asked = [conversation("What?", one, " or ", two) for one, two in spellings]
    for result in llm.chat(asked, GREEDY):
        assert list(result.outputs[0].token_ids) == wanted
        assert list(result.prompt_token_ids) == llm.encode_chat(asked[0])
    swapped = llm.chat(conversation("What?", spellings[0][1], " or ", spellings[0][0]), GREEDY)
    assert list(swapped[0].outputs[0].token_ids) != wanted


def test_prompts_are_those_of_hugging_faces_processors(twin: AudioTwin, llm: LLM) -> None:
    for seconds in (0.2, 0.999, 0.51):
        clip = speech(seconds)
        heard = {"type": "audio", "audio": (clip, RATE)}
        for parts in ((heard, "a"), ("b\n", heard), ("c", heard, "\n\nd")):
            places = [PLACE if part is heard else part for part in parts]
            wanted = twin.prompt(conversation(*places), [clip])
            assert llm.encode_chat(conversation(*parts)) == wanted
    spelled = "<|AUDIO|><|audio_pad|>[AUDIO]"
    ids = llm.encode_chat(conversation(spelled, heard))
    assert spelled in llm.decode(ids, skip_special_tokens=False)
    assert ids.count(AUDIO) == wanted.count(AUDIO)


def test_other_rates_and_channels_sound_the_same(twin: AudioTwin, llm: LLM) -> None:
    import numpy as np

    slow = speech(0.5, 3, rate=RATE)
    stereo = np.stack([slow * 1.5, slow * 0.5], axis=1)
    one = llm.chat(conversation({"type": "audio", "audio": (slow, RATE)}), GREEDY)
    two = llm.chat(conversation({"type": "audio", "audio": encoded(stereo)}), GREEDY)
    assert one[0].outputs[0].token_ids == two[0].outputs[0].token_ids
    fast = {"type": "audio", "audio": (speech(0.5, 3, rate=48_000), 48_000)}
    assert llm.encode_chat(conversation(fast)) == list(one[0].prompt_token_ids)


def test_what_cannot_be_heard_is_refused(tmp_path: Path) -> None:
    model = AudioTwin("qwen2_audio", tmp_path / "model").directory
    one = {"type": "audio", "audio": (speech(0.3), RATE)}
    with LLM(model, max_audio_clips=1, **OPTIONS) as llm:
        for parts, words in (
            ([one, one], "2 audio clips; at most 1"),
            ([{"type": "audio", "audio": b"no"}], "is not WAV"),
            ([{"type": "audio", "audio": encoded(speech(0.3))[:30]}], "is not WAV"),
            ([{"type": "audio", "audio": "http://x/"}], "nothing is fetched"),
            ([{"type": "audio", "audio": 5}], "cannot be a int"),
            ([{"type": "audio", "audio": (speech(1.2), RATE)}], "at most 1 s are taken"),
            ([{"type": "audio", "audio": (speech(0.001), RATE)}], "too short"),
            ([{"type": "audio", "audio": encoded(speech(0))}], "is empty"),
            ([{"type": "audio", "audio": (speech(0.3) * float("nan"), RATE)}], "not numbers"),
            ([{"type": "image", "image": "x.png"}], "takes no images here"),
        ):
            with pytest.raises(InvalidParameter, match=words):
                llm.chat(conversation(*parts), GREEDY)
        with pytest.raises(OSError, match=r"no\.wav"):
            llm.chat(conversation({"type": "audio", "audio": "no.wav"}), GREEDY)
    with (
        LLM(model, max_audio_clips=0, **OPTIONS) as llm,
        pytest.raises(InvalidParameter, match="takes no audio here"),
    ):
        llm.chat(conversation(one), GREEDY)
