"""Whisper behind /v1/audio: the transcripts are those of Hugging Face's model and rules."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from engine.audio.long_form import LongForm, Segment, of_any_length
from engine.audio.read import process_audio
from tests.servers import MODEL, Server, running_server
from tests.tiny_audio import encoded, speech
from tests.tiny_whisper import EOT, NO_SPEECH, RATE, SOT, STAMPS, Twin
from tests.whisper_prompts import rules_of

URL = "/v1/audio/transcriptions"
CLIP, LONG = speech(0.9, 1), speech(2.3, 4)
WAV, LONG_WAV = encoded(CLIP), encoded(LONG)
COUNT, MAX_TEXT = 12, 40


class Ears:
    """A twin and a server of it."""

    def __init__(self, twin: Twin, server: Server) -> None:
        self.twin = twin
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.rules, self.tokens = rules_of(twin.directory)

    def language(self, samples: np.ndarray) -> str:
        scores = self.twin.logits(samples, [SOT])[-1]
        return max(self.tokens.languages, key=lambda each: float(scores[each[1]]))[0]

    def transcript(
        self, samples: np.ndarray, language: str, *, stamped: bool = False, **options: Any
    ) -> list[int]:
        prompt = self.tokens.prompt(language, has_timestamps=stamped, **options)
        found = self.twin.greedy(samples, prompt, COUNT, stamped=stamped)
        return [token for token in found if token != EOT]

    def text(self, token_ids: list[int]) -> str:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.twin.directory / "tokenizer.json"))
        return tokenizer.decode([token for token in token_ids if token < STAMPS])

    def windows(self, samples: np.ndarray, *, stamped: bool) -> list[Segment]:
        """What is said in English, with windows of Hugging Face's transcripts."""
        sound = process_audio(samples, RATE, of_any_length(self.rules))
        speech, found = LongForm(sound, self.rules, has_timestamps=stamped), list[Segment]()
        prompt = self.tokens.prompt("en", has_timestamps=stamped)
        while (window := speech.next()) is not None:
            heard = np.frombuffer(window.clip.samples, np.float32)
            ids = self.twin.greedy(heard, prompt, MAX_TEXT - len(prompt), stamped=stamped)
            found += speech.take([token for token in ids if token != EOT])
        return found

    def post(self, url: str = URL, file: bytes = WAV, **fields: Any) -> httpx.Response:
        given = {"model": MODEL, "max_completion_tokens": str(COUNT), **fields}
        return httpx.post(
            f"{self.server.url}{url}",
            data={name: value for name, value in given.items() if value is not None},
            files={"file": ("a.wav", file)},
            timeout=60,
        )


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ears]:
    twin = Twin(tmp_path_factory.mktemp("whisper") / MODEL, max_target_positions=MAX_TEXT)
    flags = (str(twin.directory), "--dtype", "float32")
    with running_server(tmp_path_factory.mktemp("log") / "log", *flags) as server:
        yield Ears(twin, server)


def test_what_was_said_is_what_hugging_face_hears(ears: Ears) -> None:
    create = ears.client.audio.transcriptions.create
    given: dict[str, Any] = {"model": MODEL, "extra_body": {"max_completion_tokens": COUNT}}
    for language in ("de", "English"):
        code = {"English": "en"}.get(language, language)
        wanted = ears.text(ears.transcript(CLIP, code)).strip()
        answer: Any = create(file=("a.wav", WAV), language=language, **given)
        assert answer.text == wanted
        assert (answer.usage.type, answer.usage.seconds) == ("duration", 1)
    detected = ears.language(CLIP)
    wanted = ears.text(ears.transcript(CLIP, detected)).strip()
    assert create(file=("a.wav", WAV), **given).text == wanted
    assert create(file=("a.wav", WAV), response_format="text", **given) == wanted + "\n"
    events: list[Any] = list(create(file=("a.wav", WAV), stream=True, **given))
    pieces = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == wanted
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", wanted)


def test_earlier_text_and_translations(ears: Ears) -> None:
    earlier = ears.client.audio.transcriptions.create(
        file=("a.wav", WAV), model=MODEL, language="en", prompt="Ada, Bob",
        extra_body={"max_completion_tokens": COUNT},
    )  # fmt: skip
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ears.twin.directory / "tokenizer.json"))
    ids = tokenizer.encode(" Ada, Bob", add_special_tokens=False).ids
    wanted = ears.text(ears.transcript(CLIP, "en", earlier=ids)).strip()
    assert earlier.text == wanted
    assert wanted != ears.text(ears.transcript(CLIP, "en")).strip()
    answer = ears.post("/v1/audio/translations").json()
    ids = ears.transcript(CLIP, ears.language(CLIP), translates=True)
    assert answer["text"] == ears.text(ids).strip()


def test_times(ears: Ears) -> None:
    answer: Any = ears.client.audio.transcriptions.create(
        file=("a.wav", LONG_WAV), model=MODEL, language="en", response_format="verbose_json",
        timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (answer.language, answer.task, float(answer.duration)) == ("english", "transcribe", 2.3)
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 3)
    wanted = ears.windows(LONG, stamped=True)
    texts = [ears.text(list(each.token_ids)) for each in wanted]
    assert [
        (each.start, each.end, each.tokens, each.text, each.seek) for each in answer.segments
    ] == [
        (each.start_s, each.end_s, list(each.token_ids), text, round(100 * each.window_start_s))
        for each, text in zip(wanted, texts, strict=True)
        if text.strip()
    ]
    assert len({each.seek for each in answer.segments}) > 2
    assert answer.text == "".join(texts).strip()
    first = answer.segments[0]
    silence = ears.twin.logits(LONG[:RATE], [SOT])[-1].softmax(-1)[NO_SPEECH]
    assert first.no_speech_prob == pytest.approx(float(silence), rel=1e-3)
    assert first.avg_logprob < 0 < first.compression_ratio
    srt = ears.post(response_format="srt", language="en")
    clock = r"\d\d:\d\d:\d\d,\d\d\d"
    assert re.match(rf"1\n{clock} --> {clock}\n", srt.text)
    vtt = ears.post(response_format="vtt", language="en")
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text.count("-->") == srt.text.count("-->") > 0


def test_recordings_longer_than_a_window(ears: Ears) -> None:
    plain = ears.post(file=LONG_WAV, language="en", max_completion_tokens=None).json()
    texts = [ears.text(list(each.token_ids)) for each in ears.windows(LONG, stamped=False)]
    assert len(texts) == 3
    assert plain["text"] == "".join(texts).strip()
    some = ears.post(file=LONG_WAV, language="en", max_completion_tokens="7").json()
    assert plain["text"].startswith(some["text"])


@pytest.mark.slow
def test_an_engine_that_dies_costs_no_word(ears: Ears) -> None:
    """Whatever window it was at."""

    def words(answer: httpx.Response) -> list[tuple[float, float, list[int]]]:
        return [(each["start"], each["end"], each["tokens"]) for each in answer.json()["segments"]]

    ears.server.wait_idle()
    asked: dict[str, Any] = {"file": encoded(speech(12.3, 7)), "response_format": "verbose_json"}
    asked |= {"language": "en", "max_completion_tokens": None}
    before = ears.server.metrics()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ears.post, **asked)
        name = "generation_tokens_total"
        ears.server.wait_for(lambda metrics: metrics[name] > before[name] + 20, "some words")
        ears.server.engines()[0].kill()
        found = words(answer.result())
    name = "engine_restarts_total"
    assert ears.server.metrics()[name] == before[name] + 1
    assert found == words(ears.post(**asked))
    assert len(found) > 10


@pytest.mark.slow
def test_a_long_recording_waits_while_the_server_is_full(ears: Ears, tmp_path: Path) -> None:
    """Its first window is refused as any request, later ones wait for their turn."""
    flags = ("--dtype", "float32", "--max-num-seqs", "1", "--max-queued-requests", "1")
    with running_server(tmp_path / "log", str(ears.twin.directory), *flags) as server:
        crowded = Ears(ears.twin, server)
        asked = {"file": encoded(speech(12.3, 6)), "language": "en", "max_completion_tokens": None}
        wanted = crowded.post(**asked).json()
        ended = threading.Event()

        def crowd(seed: int) -> list[int]:
            told = []
            while not ended.is_set():
                clip = encoded(speech(0.9, seed))
                told.append(crowded.post(file=clip, language="de").status_code)
            return told

        with ThreadPoolExecutor(6) as pool:
            others = [pool.submit(crowd, seed) for seed in range(20, 24)]
            long = {**asked, "file": encoded(speech(12.3, 8))}
            first = next(
                answer for _ in range(200) if (answer := crowded.post(**long)).status_code != 503
            )
            ended.set()
            statuses = {status for other in others for status in other.result()}
        assert first.status_code == 200, first.text
        assert statuses == {200, 503}
        assert first.json() == crowded.post(**long).json()
        assert crowded.post(**asked).json() == wanted


@pytest.mark.parametrize(("fields", "param"), [
    ({"response_format": "diarized_json"}, "response_format"),
    ({"response_format": "srt", "stream": "true"}, "stream"),
    ({"timestamp_granularities[]": "word", "response_format": "verbose_json"},
     "timestamp_granularities[]"),
    ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]"),
    ({"timestamp_granularities[]": ["segment", "word"], "response_format": "verbose_json"},
     "timestamp_granularities[]"),
    ({"include[]": "logprobs"}, "include[]"),
    ({"temperature": "9"}, "temperature"),
    ({"language": "fr"}, "language"),
    ({"file": b"no audio"}, "file"),
    ({"max_completion_tokens": "0"}, "max_completion_tokens"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(ears: Ears, fields: dict[str, Any], param: str) -> None:
    refused = ears.post(**fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_other_endpoints(ears: Ears) -> None:
    client = ears.client
    assert client.models.list().data[0].id == MODEL
    with pytest.raises(openai.BadRequestError, match="only transcribes"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="only transcribes"):
        client.completions.create(model=MODEL, prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="only transcribes"):
        client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="Hi")
