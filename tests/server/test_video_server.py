"""A model that reads videos behind a real server, asked with the openai SDK."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine import LLM, SamplingParams
from tests.servers import MODEL, Server, running_server
from tests.tiny_video import VideoTwin, moving, recorded

QUESTION = "What moves?"
FILE = recorded(moving(40), fps=10)
OTHER = recorded(moving(40, seed=1), fps=10)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return VideoTwin("qwen2_5_vl", tmp_path_factory.mktemp("twin") / MODEL).directory


@pytest.fixture(scope="module")
def seeing(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (str(directory), "--dtype", "float32", "--max-video-s", "5", "--max-videos", "2")
    with running_server(tmp_path_factory.mktemp("seeing") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(seeing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def part(data: bytes = FILE) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def asking(*parts: dict[str, Any], **extra: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {
        **{"model": MODEL, "messages": [{"role": "user", "content": content}]},
        **{"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True, **extra}},
    }


def test_what_is_said_of_a_video_is_what_is_said_offline(
    directory: Path, client: openai.OpenAI, seeing: Server
) -> None:
    answer = client.chat.completions.create(**asking(part()))
    text = answer.choices[0].message.content
    chunks = client.chat.completions.create(**asking(part()), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert answer.usage is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(directory, num_threads=1, use_tqdm=False, dtype="float32") as llm:
        shown = [{"type": "video", "video": FILE}, {"type": "text", "text": QUESTION}]
        (result,) = llm.chat([{"role": "user", "content": shown}], greedy)
    assert result.outputs[0].text == text
    assert len(result.prompt_token_ids) == answer.usage.prompt_tokens
    other = client.chat.completions.create(**asking(part(OTHER)))
    assert other.choices[0].message.content != text
    counted = seeing.metrics()
    assert (counted["prompt_videos_total"], counted["prompt_images_total"]) == (3, 0)


def test_requests_choose_frames_and_share_prefixes(client: openai.OpenAI) -> None:
    usages = []
    for video in ({"num_frames": 4}, {"num_frames": 8}, {"fps": 1}, {"num_frames": 8}):
        extra = {"media_io_kwargs": {"video": video}}
        usages.append(client.chat.completions.create(**asking(part(), **extra)).usage)
    four, eight, second, again = usages
    assert four is not None
    assert four.prompt_tokens == second.prompt_tokens  # 4 seconds
    assert eight.prompt_tokens > four.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens > eight.prompt_tokens - 20


@pytest.mark.parametrize(("parts", "extra", "words"), [
    ([part(b"no")], {}, "in video 1 of 1: the video is not MP4"),
    ([part(recorded(moving(60), fps=10))], {}, "6.0 s long; at most 5 s"),
    ([part(), part(), part()], {}, "holds 3 videos; at most 2"),
    ([{"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}], {}, "nothing is fetched"),
    ([{"type": "video_url", "video_url": {"url": "data:image/png;base64,AA"}}], {}, "data:video/"),
    ([{"type": "video_url"}], {}, "data:video/"),
    ([part()], {"media_io_kwargs": {"video": {"fps": 0}}}, "'fps' must be -1 or a number above 0"),
    ([part()], {"media_io_kwargs": {"video": {"num_frames": 2.5}}}, "must be -1 or a whole number"),
    ([part()], {"media_io_kwargs": {"image": {}}}, "'image', which is not supported"),
    ([part()], {"truncate_prompt_tokens": 5}, "is not available with videos"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(
    client: openai.OpenAI, parts: list[dict[str, Any]], extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**asking(*parts, **extra))
