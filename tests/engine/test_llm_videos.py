"""The offline LLM gives Hugging Face's answers to conversations with videos."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from engine.images.positions import prompt_positions
from engine.offline.videos import VideoSource, process_videos
from engine.video.read import VideoReader
from tests.tiny_video import VideoTwin, moving, recorded

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "use_tqdm": False, "dtype": "float32"}
KINDS = (
    *("qwen2_5_vl", "qwen3_vl"),
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "qwen2_vl",
            "qwen3_vl_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "glm4v",
            "glm46v",
            "glm4v_moe",
            "internvl",
            "lfm3_vl",
        )
    ),
)
PLACE = {"type": "video"}


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoTwin:
    return VideoTwin(request.param, tmp_path_factory.mktemp(request.param) / "model")


def conversation(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": shown}]


def opened(twin: VideoTwin, **options: Any) -> LLM:
    return LLM(twin.directory, max_video_tokens=60, **OPTIONS, **options)


def test_what_is_said_of_videos_is_what_hugging_face_says(twin: VideoTwin, tmp_path: Path) -> None:
    """Of frames and of files, however the prompt is chunked."""
    frames = moving(5)  # the last one completes a part
    file = tmp_path / "five.mp4"
    file.write_bytes(recorded(frames, fps=8))
    url = "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode()
    shown = [Image.fromarray(frame) for frame in frames]
    with opened(twin, max_num_batched_tokens=16) as llm:
        asked = conversation("Who?", {"type": "video", "video": shown, "fps": 8.0}, "moves")
        prompt = llm._encode_conversation(asked)
        first = prompt.images[0]
        cell = llm._video_rules.cell if llm._video_rules else 0
        grid = len(prompt.images), 2 * first.height // cell, 2 * first.width // cell
        assert grid[0] == (5 if twin.is_internvl else 3)
        places = conversation("Who?", PLACE, "moves")
        assert prompt.token_ids == twin.prompt(places, range(5), 8.0, grid)
        more = {}
        if twin.kind == "qwen2_5_vl":
            more["second_per_grid_ts"] = torch.tensor([2 / 8])
        wanted = twin.answer((prompt.token_ids, prompt.images), 8, **more)
        (result,) = llm.chat(asked, GREEDY)
        assert list(result.outputs[0].token_ids) == wanted
        # In a batch of its spellings; a file's colours are nearly the same.
        sources = (np.stack(frames), url, file, file.read_bytes())
        several = []
        for source in sources:
            part = {"type": "video", "video": source, "fps": 8.0}
            several.append(conversation("Who?", part, "moves"))
        results = llm.chat(several, GREEDY)
        assert list(results[0].outputs[0].token_ids) == wanted
        texts = [result.outputs[0].token_ids for result in results]
        assert texts[1] == texts[2] == texts[3]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> VideoTwin:
    return VideoTwin("qwen2_5_vl", tmp_path_factory.mktemp("timed") / "model")


@pytest.fixture(scope="module")
def llm(timed: VideoTwin) -> Iterator[LLM]:
    with opened(timed, max_videos=2) as loaded:
        yield loaded


def test_the_text_behind_a_long_video_begins_after_its_last_time(
    timed: VideoTwin, llm: LLM
) -> None:
    """As the model was published; Hugging Face's newer code lets it begin at its sides."""
    frames = [Image.fromarray(frame) for frame in moving(7)]
    asked = conversation("Who?", {"type": "video", "video": frames, "fps": 1.0}, "moves")
    prompt = llm._encode_conversation(asked)
    assert [part.video.time for part in prompt.images if part.video] == [0, 8, 16, 24]
    count = len(prompt.token_ids)
    found = prompt_positions(count, prompt.images, llm._video_rules.cell if llm._video_rules else 0)
    last = prompt.images[-1]
    behind = last.start + last.num_tokens
    assert found.of_prompt[:, behind].tolist() == [prompt.images[0].start + 25] * 3
    given = timed.inputs((prompt.token_ids, prompt.images))
    given.pop("mm_token_type_ids")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    (result,) = llm.chat(asked, sampling)
    (output,) = result.outputs
    ids = torch.tensor([[*prompt.token_ids, *output.token_ids]])
    after = np.arange(count, ids.shape[1]) + found.delta
    positions = np.concatenate((found.of_prompt, np.tile(after, (3, 1))), axis=1)
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        logits = timed.model(
            **given, position_ids=torch.from_numpy(positions).long()[:, None]
        ).logits[0, :-1]
    assert logits[count - 1 :].argmax(-1).tolist() == list(output.token_ids)
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    told = [*(result.prompt_logprobs or ()), *(output.logprobs or ())]
    own = torch.tensor([each.logprob for each in told if each.logprob is not None])
    torch.testing.assert_close(own, wanted, atol=1e-4, rtol=0)


def test_the_same_frames_at_another_rate_are_another_prefix(timed: VideoTwin, llm: LLM) -> None:
    """Their tokens and pixels are equal, their positions are not."""
    frames = [Image.fromarray(frame) for frame in moving(8)]
    texts = []
    for fps in (1.0, 8.0, 1.0):
        part = {"type": "video", "video": frames, "fps": fps}
        (result,) = llm.chat(conversation(part, "who moves here?"), GREEDY)
        texts.append((result.outputs[0].token_ids, result.num_cached_tokens))
    assert texts[0][0] == texts[2][0] != texts[1][0]
    assert texts[2][1] >= 48 > 16 >= texts[1][1]  # the first part has the same positions


def test_images_and_videos_are_shown_in_their_order(timed: VideoTwin, llm: LLM) -> None:
    frames = [Image.fromarray(frame) for frame in moving(4)]
    video = {"type": "video", "video": frames}
    image = {"type": "image", "image": frames[0]}
    prompt = llm._encode_conversation(conversation(image, "a", video, image, video))
    kinds = [None if each.video is None else each.video.index for each in prompt.images]
    assert kinds == [None, 0, 1, None, 0, 1]
    starts = [each.start for each in prompt.images]
    assert starts == sorted(starts)


def test_what_cannot_be_shown_is_refused(llm: LLM) -> None:
    frame = Image.fromarray(moving(1)[0])
    one = {"type": "video", "video": [frame]}
    other = frame.resize((40, 40))
    for parts, words in (
        ([one, one, one], "3 videos; at most 2"),
        ([{"type": "video", "video": b"no"}], "is not MP4"),
        ([{"type": "video", "video": "http://x/"}], "nothing is fetched"),
        ([{"type": "video", "video": 5}], "cannot be a int"),
        ([{"type": "video", "video": []}], "0 frames"),
        ([{"type": "video", "video": [frame] * 65}], "65 frames; 1 to 64"),
        ([{"type": "video", "video": [frame, other]}], "several sizes"),
        ([{"type": "video", "video": ["a.png"]}], "cannot be a str"),
        ([{"type": "video", "video": np.zeros((2, 8, 8))}], "uint8 of shape"),
        ([{"type": "video", "video": [frame], "fps": 0}], "must be a positive number"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            llm.chat(conversation(*parts), GREEDY)


def test_models_without_videos_refuse_them() -> None:
    with pytest.raises(InvalidParameter, match="takes no videos here"):
        process_videos([VideoSource(moving(2))], None, VideoReader())
