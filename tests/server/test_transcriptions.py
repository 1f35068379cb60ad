"""Transcriptions and translations through OpenAI's SDK, for each way of asking a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.openai.transcriptions import Transcript
from tests.servers import MODEL, Server, running_server
from tests.tiny_audio import encoded, speech
from tests.tiny_audio_twin import AudioTwin

URL = "/v1/audio/transcriptions"
CLIP = speech(0.9, 1)
WAV = encoded(CLIP)
COUNT = 12


class Asr:
    """A twin and a server of it."""

    def __init__(self, twin: AudioTwin, server: Server) -> None:
        self.twin = twin
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def expected(self, *texts: str, suffix: str = "", system: str | None = None) -> str:
        """Hugging Face's answer to the clip and texts."""
        content = [{"type": "audio"}, *({"type": "text", "text": text} for text in texts)]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids = self.twin.answer(messages, [CLIP], COUNT, suffix)
        if 149 in ids:  # the end
            ids = ids[: ids.index(149)]
        return self.twin.text(ids).strip()

    def post(self, url: str = URL, file: bytes = WAV, **fields: Any) -> httpx.Response:
        given = {"model": MODEL, "max_completion_tokens": str(COUNT), **fields}
        return httpx.post(
            f"{self.server.url}{url}",
            data={name: value for name, value in given.items() if value is not None},
            files={"file": ("a.wav", file)},
            timeout=60,
        )


@pytest.fixture(scope="module", params=[
    "voxtral",
    pytest.param("qwen2_audio", marks=pytest.mark.slow),
    pytest.param("qwen3_asr", marks=pytest.mark.slow),
])  # fmt: skip
def asr(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asr]:
    twin = AudioTwin(request.param, tmp_path_factory.mktemp(request.param) / MODEL)
    flags = (str(twin.directory), "--dtype", "float32")
    with running_server(tmp_path_factory.mktemp("asr") / "log", *flags) as server:
        yield Asr(twin, server)


def test_what_was_said_is_what_hugging_face_hears(asr: Asr) -> None:
    limit = {"max_completion_tokens": COUNT}
    by_kind = {
        "voxtral": (
            lambda: asr.expected(suffix="[TRANSCRIBE]"),
            lambda: asr.expected(suffix="lang:en[TRANSCRIBE]"),
        ),
        "qwen2_audio": (
            lambda: asr.expected(
                "Write down the speech, word for word. Answer with its text alone."
            ),
            lambda: asr.expected(
                "Write down the speech in English, word for word. Answer with its text alone."
            ),
        ),
        "qwen3_asr": (
            lambda: asr.expected(system="").rpartition("<asr_text>")[2].strip(),
            lambda: asr.expected(system="", suffix="language English<asr_text>"),
        ),
    }
    plain, in_english = (expect() for expect in by_kind[asr.twin.kind])
    create = asr.client.audio.transcriptions.create
    answer = create(model=MODEL, file=("a.wav", WAV), extra_body=limit)
    assert answer.text == plain
    usage: Any = answer.usage
    assert usage.type == "tokens"
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_token_details.audio_tokens > 10
    for language in ("en", "English"):
        answer = create(model=MODEL, file=("a.wav", WAV), language=language, extra_body=limit)
        assert answer.text == in_english
    text = create(
        model=MODEL, file=("a.wav", WAV), language="en", response_format="text", extra_body=limit
    )
    assert text == in_english + "\n"
    events = list(
        create(model=MODEL, file=("a.wav", WAV), language="en", stream=True, extra_body=limit)
    )
    pieces = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(pieces) == in_english
    done: Any = events[-1]
    assert (done.type, done.text) == ("transcript.text.done", in_english)
    assert done.usage.output_tokens <= COUNT


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by the SDK's types
def test_translations(asr: Asr) -> None:
    create = asr.client.audio.translations.create
    if asr.twin.kind == "qwen3_asr":
        with pytest.raises(openai.BadRequestError, match="does not translate"):
            create(model=MODEL, file=("a.wav", WAV))
        return
    answer = create(model=MODEL, file=("a.wav", WAV), extra_body={"max_completion_tokens": COUNT})
    instruction = "Translate the speech into English. Answer with the translation alone."
    assert answer.text == asr.expected(instruction)


def test_prompts_have_an_effect_or_are_reported(asr: Asr) -> None:
    answer = asr.post(prompt="Names: Ada.", temperature="0")
    assert answer.status_code == 200
    if asr.twin.kind == "qwen3_asr":
        wanted = asr.expected(system="Names: Ada.").rpartition("<asr_text>")[2].strip()
        assert answer.json()["text"] == wanted
        assert "x-quire-ignored-params" not in answer.headers
    else:
        assert answer.headers["x-quire-ignored-params"] == "prompt"


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": "srt"}, "response_format"),
    ({"response_format": "verbose_json"}, "response_format"),
    ({"response_format": "xml"}, "response_format"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
    ({"include[]": "logprobs"}, "include[]"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": "9"}, "temperature"),
    ({"stream": "maybe"}, "stream"),
    ({"language": "no language"}, "language"),
    ({"model": None}, "model"),
    ({"file": b"no audio"}, "file"),
    ({"file": b""}, "file"),
    ({"file": encoded(speech(60.0)), "max_completion_tokens": None}, "file"),
    ({"max_completion_tokens": "0"}, "max_completion_tokens"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(asr: Asr, fields: dict[str, Any], param: str) -> None:
    refused = asr.post(**fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert "messages" not in refused.json()["error"]["message"]


def test_other_errors(asr: Asr, server: Server) -> None:
    assert asr.post(model="nobody").status_code == 404
    refused = httpx.post(f"{asr.server.url}{URL}", json={"model": MODEL})
    assert refused.status_code == 415
    refused = httpx.post(f"{asr.server.url}{URL}", data={"model": MODEL}, files={"x": b""})
    assert refused.json()["error"]["param"] == "file"
    deaf = httpx.post(f"{server.url}{URL}", data={"model": MODEL}, files={"file": WAV})
    assert deaf.status_code == 400
    assert deaf.json()["error"] == {
        **{"message": "'model' takes no audio here", "param": "model"},
        **{"type": "invalid_request_error", "code": deaf.json()["error"]["code"]},
    }


def test_the_schema_describes_the_routes(asr: Asr) -> None:
    paths = httpx.get(f"{asr.server.url}/openapi.json").json()["paths"]
    for name in ("transcriptions", "translations"):
        operation = paths[f"/v1/audio/{name}"]["post"]
        form = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert form["required"] == ["file", "model"]
        assert "text/event-stream" in operation["responses"]["200"]["content"]


def test_a_transcript_is_trimmed_and_begins_behind_the_marker() -> None:
    for pieces, marker, wanted in (
        ([" a", " ", "b ", " "], "", ["a", "", " b", "", ""]),
        (["language En", "glish<asr", "_text> Hi", " you"], "<asr_text>", ["", "", "Hi", " you"]),
        (["no ", "marker"], "<asr_text>", ["", "", "no marker"]),
        (["  ", " "], "", ["", "", ""]),
    ):
        transcript = Transcript(marker)
        found = [transcript.add(piece) for piece in pieces]
        found.append(transcript.end())
        assert [piece for piece in found if piece] == [piece for piece in wanted if piece]
        assert transcript.text == "".join(wanted)
        assert json.dumps(transcript.text.strip()) == json.dumps(transcript.text)
