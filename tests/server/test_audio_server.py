"""A model that hears behind a real server: chats, responses, batches, crashes and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from tests.servers import MODEL, Server, running_server
from tests.tiny_audio import speech, wav_base64
from tests.tiny_audio_twin import AudioTwin

CHAT = "/v1/chat/completions"
QUESTION = "What is it?"
NUM_TOKENS = 10


def asking(clip: np.ndarray, text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    audio = {"data": wav_base64(clip), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": text}]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        **greedy,
        **fields,
    }


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> AudioTwin:
    return AudioTwin("qwen2_audio", tmp_path_factory.mktemp("twin") / MODEL)


@pytest.fixture(scope="module")
def hearing(twin: AudioTwin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (str(twin.directory), "--dtype", "float32", "--max-audio-clips", "2")
    with running_server(tmp_path_factory.mktemp("hearing") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(hearing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(twin: AudioTwin, clip: np.ndarray, count: int = NUM_TOKENS) -> str:
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
    return twin.text(twin.answer([{"role": "user", "content": content}], [clip], count))


def test_what_is_said_of_audio_is_what_hugging_face_says(
    twin: AudioTwin, client: openai.OpenAI, hearing: Server
) -> None:
    texts = []
    before = hearing.metrics()["prompt_audio_clips_total"]
    for seed in (1, 2):
        clip = speech(0.7, seed)
        body = asking(clip, extra_body={"ignore_eos": True})
        del body["ignore_eos"]
        answer = client.chat.completions.create(**body)
        texts.append(answer.choices[0].message.content)
        assert texts[-1] == expected(twin, clip)
        chunks = client.chat.completions.create(**body, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == texts[-1]
    assert texts[0] != texts[1]
    assert hearing.metrics()["prompt_audio_clips_total"] - before == 4


def test_other_spellings_of_an_audio_part(twin: AudioTwin, hearing: Server) -> None:
    clip = speech(0.5, 4)
    wanted = expected(twin, clip)
    body = asking(clip)
    both = hearing.post(CHAT, {**body, "n": 2}).json()["choices"]
    assert [choice["message"]["content"] for choice in both] == [wanted, wanted]
    url = {"url": f"data:audio/wav;base64,{wav_base64(clip)}"}
    part = {"type": "audio_url", "audio_url": url}
    shown = [part, {"type": "text", "text": QUESTION}]
    body["messages"] = [{"role": "user", "content": shown}]
    assert said(hearing.post(CHAT, body).json()) == wanted
    counted = hearing.post("/tokenize", {"messages": body["messages"]}).json()
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}]
    assert counted["tokens"] == twin.prompt([{"role": "user", "content": content}], [clip])


def test_a_prefix_is_shared_by_those_who_hear_the_same(hearing: Server) -> None:
    long = "w" * 40
    first, again, other = (
        hearing.post(CHAT, asking(speech(0.98, seed), long)).json() for seed in (5, 5, 6)
    )
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        for answer in (first, again, other)
    ]
    assert cached[1] > 42 > 24 >= max(cached[0], cached[2])
    assert said(first) == said(again) != said(other)


def test_responses_hear_and_go_on(twin: AudioTwin, hearing: Server) -> None:
    clip = speech(0.6, 7)
    audio = {"data": wav_base64(clip), "format": "wav"}
    heard = {"type": "input_audio", "input_audio": audio}
    item = {"role": "user", "content": [heard, {"type": "input_text", "text": QUESTION}]}
    body = {
        **{"model": MODEL, "max_output_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        "input": [item],
    }
    first = hearing.post("/v1/responses", body).json()
    assert first["output"][0]["content"][0]["text"] == expected(twin, clip)
    items = hearing.get(f"/v1/responses/{first['id']}/input_items").json()
    assert items["data"][0]["content"][0] == heard
    more = {**body, "input": "And now?", "previous_response_id": first["id"]}
    later = hearing.post("/v1/responses", more).json()
    assert later["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 15


@pytest.mark.parametrize(("audio", "words"), [
    ({"data": "bm8=", "format": "wav"}, "is not WAV"),
    ({"data": "%%", "format": "wav"}, "audio is not in base64"),
    ({"data": wav_base64(speech(1.5)), "format": "wav"}, "1.5 s long; at most 1 s"),
    ({"data": "bm8=", "format": "amr"}, "its format must be one of wav"),
    ({"format": "wav"}, "the file's 'data' in base64"),
])  # fmt: skip
def test_bad_audio_is_a_clear_400(hearing: Server, audio: dict[str, str], words: str) -> None:
    part = {"type": "input_audio", "input_audio": audio}
    body = {**asking(speech(0.1)), "messages": [{"role": "user", "content": [part]}]}
    refused = hearing.post(CHAT, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.0.content"
    assert words in refused.json()["error"]["message"]


def test_more_that_is_refused(hearing: Server) -> None:
    heard = asking(speech(0.1))["messages"][0]["content"]
    fetched = {"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/a.wav"}}
    for messages, words in (
        ([{"role": "user", "content": heard * 3}], "3 audio clips; at most 2"),
        ([{"role": "user", "content": [fetched]}], "nothing is fetched"),
        ([{"role": "system", "content": heard}], "system cannot hold audio"),
    ):
        refused = hearing.post(CHAT, {**asking(speech(0.1)), "messages": messages})
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    refused = hearing.post(CHAT, asking(speech(0.1), truncate_prompt_tokens=5))
    assert "is not available with audio" in refused.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.slow
def test_an_engine_that_dies_takes_no_audio_with_it(twin: AudioTwin, hearing: Server) -> None:
    hearing.wait_idle()
    body = asking(speech(0.9, 9), max_tokens=300)
    wanted = said(hearing.post(CHAT, body).json())
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(hearing.stream, CHAT, body)
        hearing.wait_for(lambda metrics: metrics["num_requests_running"] >= 1, "a request")
        hearing.engines()[0].kill()
        lines = [line for line in stream.result().splitlines() if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == wanted
    assert wanted.startswith(expected(twin, speech(0.9, 9)).rstrip("\ufffd"))


def test_a_model_that_cannot_hear_says_so(server: Server) -> None:
    refused = server.post(CHAT, asking(speech(0.1)))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "messages.0.content"
    assert error["message"].endswith("holds audio, and this model takes none here; send text")
