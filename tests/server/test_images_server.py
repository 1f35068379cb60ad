"""A vision model behind real servers, including two engines and two API workers."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.servers import MODEL, Server, running_server
from tests.tiny_vision_twin import Twin

CHAT = "/v1/chat/completions"
QUESTION = "What is it?"
NUM_TOKENS = 12


def photo(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def asking(image: Image.Image, text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{encoded(image)}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    return {"model": MODEL, "messages": messages, **greedy, **fields}


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def streamed(answer: bytes) -> str:
    lines = [
        line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data")
    ]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin("qwen2_5_vl", tmp_path_factory.mktemp("twin") / MODEL)


@pytest.fixture(scope="module")
def seeing(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (str(twin.directory), "--dtype", "float32", "--data-parallel-size", "2")
    flags += ("--api-workers", "2")
    with running_server(tmp_path_factory.mktemp("seeing") / "log", *flags) as server:
        yield server


@pytest.fixture
def client(seeing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(twin: Twin, image: Image.Image, num_tokens: int = NUM_TOKENS) -> str:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    ids = twin.answer([{"role": "user", "content": content}], [image], num_tokens)
    return twin.text(ids)


def test_what_is_said_of_an_image_is_what_hugging_face_says(
    twin: Twin, client: openai.OpenAI
) -> None:
    texts = []
    for seed in (1, 2):
        body = asking(photo(seed), extra_body={"ignore_eos": True})
        del body["ignore_eos"]
        answer = client.chat.completions.create(**body)
        texts.append(answer.choices[0].message.content)
        assert texts[-1] == expected(twin, photo(seed))
        assert answer.usage is not None
        chunks = client.chat.completions.create(**body, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == texts[-1]
    assert texts[0] != texts[1]


def test_a_prefix_is_shared_by_those_who_see_the_same(seeing: Server) -> None:
    long = "w" * 40
    first = seeing.post(CHAT, asking(photo(3, 200, 180), long)).json()
    again = seeing.post(CHAT, asking(photo(3, 200, 180), long)).json()
    other = seeing.post(CHAT, asking(photo(4, 200, 180), long)).json()
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        for answer in (first, again, other)
    ]
    assert cached[0] <= 16  # the part before the image may be another test's too
    assert cached[1] > 42 > 16 >= cached[2]
    assert said(first) == said(again) != said(other)


def test_every_api_and_choice_sees_the_same(twin: Twin, seeing: Server) -> None:
    image = photo(5)
    wanted = expected(twin, image)
    both = seeing.post(CHAT, asking(image, n=2)).json()["choices"]
    assert [choice["message"]["content"] for choice in both] == [wanted, wanted]
    source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message = {
        **{"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0},
        "messages": [{"role": "user", "content": content}],
    }
    counted = seeing.post(
        "/v1/messages/count_tokens", {k: message[k] for k in ("model", "messages")}
    )
    answer = seeing.post("/v1/messages", message).json()
    usage = answer["usage"]
    assert (
        counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    )
    assert wanted.startswith(answer["content"][0]["text"])
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(image)}"}
    item = {"role": "user", "content": [shown, {"type": "input_text", "text": QUESTION}]}
    response = {
        **{"model": MODEL, "max_output_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        "input": [item],
    }
    first = seeing.post("/v1/responses", response).json()
    assert first["output"][0]["content"][0]["text"] == wanted
    more = {**response, "input": "And now?", "previous_response_id": first["id"]}
    later = seeing.post("/v1/responses", more).json()
    assert later["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    without = {**more, "previous_response_id": None}
    blind = seeing.post("/v1/responses", without).json()
    assert later["output"][0]["content"] != blind["output"][0]["content"]


def test_logprobs_of_a_prompt_and_its_tokens(twin: Twin, seeing: Server) -> None:
    image = photo(6)
    body = asking(image, prompt_logprobs=1, return_token_ids=True)
    answer = seeing.post(CHAT, body).json()
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    wanted = twin.prompt([{"role": "user", "content": content}], [image])
    assert answer["prompt_token_ids"] == wanted
    assert len(answer["prompt_logprobs"]) == len(wanted)


def test_a_batch_looks_at_images(client: openai.OpenAI, seeing: Server) -> None:
    bodies = [asking(photo(seed)) for seed in (1, 2)]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body})
        for i, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    answers = client.files.content(batch.output_file_id).text.splitlines()
    for line, body in zip(answers, bodies, strict=True):
        assert said(json.loads(line)["response"]["body"]) == said(seeing.post(CHAT, body).json())


@pytest.mark.slow
def test_an_engine_that_dies_takes_no_image_with_it(twin: Twin, seeing: Server) -> None:
    seeing.wait_idle()
    bodies = [asking(photo(seed), max_tokens=300) for seed in range(10, 18)]
    wanted = [said(seeing.post(CHAT, body).json()) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = [pool.submit(seeing.stream, CHAT, body) for body in bodies]
        seeing.wait_for(lambda metrics: metrics["num_requests_running"] >= 4, "running requests")
        seeing.engines()[0].kill()
        found = [streamed(stream.result()) for stream in streams]
    assert found == wanted
    assert seeing.wait_for(lambda m: m["engine_restarts_total"] == 1, "a restart")
    assert seeing.metrics()["requests_resumed_total"] >= 1
    assert wanted[0].startswith(expected(twin, photo(10)))


@pytest.mark.slow
def test_images_may_be_switched_off(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("blind") / "log"
    with running_server(log, str(twin.directory), "--max-images", "0") as blind:
        refused = blind.post(CHAT, asking(photo(1)))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages.0.content"
        assert "takes none here" in refused.json()["error"]["message"]
        assert blind.chat("Hello").status_code == 200
