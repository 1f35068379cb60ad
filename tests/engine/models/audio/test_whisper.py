"""Whisper: encoder, logits and transcripts equal Hugging Face's, however a step is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, Dtype, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded, InvalidParameter, ModelLoadError
from engine.models.audio.encoder import load_audio_encoder
from engine.models.checkpoint import read_config, read_headers
from engine.types import Request, SamplingParams
from tests.engine.handmade import Hand, load
from tests.engine.running import texts
from tests.tiny_audio import speech
from tests.tiny_whisper import DE, EN, MAX_TEXT, POSITIONS, RATE, SOT, Twin, features
from tests.whisper_prompts import rules_of, transcribe

PLACES = 64
CLIPS = [speech(1.0, 1), speech(0.43, 2), speech(0.81, 3)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("whisper") / "model")


def prompt_of(twin: Twin, language: str = "en", **options: Any) -> list[int]:
    _, tokens = rules_of(twin.directory)
    return tokens.prompt(language, **options)


def asked(twin: Twin, number: int, *, stamped: bool, **options: Any) -> tuple[Request, list[int]]:
    """A request, and Hugging Face's transcript. Every second one has earlier text."""
    prompt = prompt_of(
        twin, ("en", "de")[number % 2], earlier=[9, 8, 7] * (number % 2), has_timestamps=stamped
    )
    clip = CLIPS[number % len(CLIPS)]
    request = transcribe(str(number), twin.directory, clip, prompt, stamped=stamped, **options)
    return request, twin.greedy(clip, prompt, 24, stamped=stamped)


def test_the_encoder_hears_what_hugging_faces_does(twin: Twin) -> None:
    config = read_config(str(twin.directory)).audio
    assert config is not None
    encoder = load_audio_encoder(config, read_headers(twin.directory), torch.float32, CPU)
    for clip in CLIPS:
        with torch.inference_mode():
            found = encoder.embed(torch.from_numpy(clip)).embeddings
            wanted = twin.model.model.encoder(features(clip)).last_hidden_state[0]
        assert found.shape == (PLACES, 32)
        torch.testing.assert_close(found[:POSITIONS], wanted, atol=1e-4, rtol=0)
        assert not found[POSITIONS:].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("chunks", [(100,), (63, 1, 2, 5, 100), (30, 37, 1, 1, 100)])
def test_logits_in_chunks(twin: Twin, backend: str, chunks: tuple[int, ...]) -> None:
    text = [*prompt_of(twin), 5, 60, 33, 41, 9]
    request = transcribe("a", twin.directory, CLIPS[1], text, prompt_logprobs=0)
    runner = load(twin.directory, attention_backend=backend)
    model: Any = runner._model
    hidden: list[torch.Tensor] = []
    forward = model.forward
    model.forward = lambda *given: hidden.append(forward(*given)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request)
    length, start = len(request.prompt_token_ids), 0
    for count in chunks:
        end = min(start + count, length)
        if start < end:
            hand.step({"a": end - start})
        start = end
    with torch.inference_mode():
        found = model.logits(torch.cat(hidden)[PLACES:])
    torch.testing.assert_close(found, twin.logits(CLIPS[1], text), atol=1e-4, rtol=0)


def test_transcripts_of_hugging_faces_generate(twin: Twin) -> None:
    """Its own search agrees with the twin's, which also gives timestamps."""
    for clip, language in zip(CLIPS[:2], ("en", "de"), strict=True):
        wanted = twin.greedy(clip, prompt_of(twin, language), 24)
        output = twin.model.generate(
            features(clip), language=language, task="transcribe", max_new_tokens=24
        )
        assert output[0].tolist()[-len(wanted) :] == wanted
        hand = Hand(load(twin.directory))
        hand.add(transcribe("a", twin.directory, clip, prompt_of(twin, language)))
        assert hand.decode("a", len(wanted)) == wanted


@pytest.mark.parametrize(("changes", "scheduler", "num_blocks"), [
    pytest.param({}, {}, 128, marks=pytest.mark.slow),
    pytest.param({"attention_backend": "reference"}, {"max_num_batched_tokens": 7}, 128,
                 marks=pytest.mark.slow),
    ({}, {"max_num_batched_tokens": 90, "overlap": True}, 128),
    pytest.param({"batch_invariant": True}, {"max_num_batched_tokens": 40}, 128,
                 marks=pytest.mark.slow),
    ({"enforce_eager": True}, {"overlap": True}, 42),  # preempts
])  # fmt: skip
def test_transcripts_under_schedules(
    twin: Twin, changes: dict[str, Any], scheduler: dict[str, Any], num_blocks: int
) -> None:
    size = 16 if num_blocks == 128 else 4
    config = EngineConfig(
        **{
            **{"model": str(twin.directory), "dtype": "float32", "num_threads": 1},
            **{"cache": CacheConfig(block_size=size, num_blocks=num_blocks)},
            **{"scheduler": SchedulerConfig(max_num_seqs=5, **scheduler), **changes},
        }
    )
    core = EngineCore.load(config)
    pairs = [asked(twin, number, stamped=number % 3 > 0) for number in range(7)]
    found = texts(core, *(request for request, _ in pairs))
    assert found == {request.id: wanted for request, wanted in pairs}
    if num_blocks < 128:
        assert core.stats.num_preemptions > 0


def test_an_evicted_or_shared_clip_is_heard_again(twin: Twin) -> None:
    """The language first, then a transcript behind the cached clip, then choices of one prompt."""
    core = EngineCore.load(
        EngineConfig(
            model=str(twin.directory),
            dtype="float32",
            num_threads=1,
            cache=CacheConfig(block_size=16, num_blocks=64),
        )
    )
    clip, languages = CLIPS[0], (EN, DE)
    detect = transcribe(
        "l", twin.directory, clip, [SOT], max_tokens=1, speech=None, allowed_token_ids=languages
    )
    scores = twin.logits(clip, [SOT])[-1]
    language = max(languages, key=lambda token: float(scores[token]))
    assert texts(core, detect) == {"l": [language]}
    hits = core.stats.prefix_cache_hits
    request, wanted = asked(twin, 0, stamped=True)
    assert texts(core, request) == {"0": wanted}
    assert core.stats.prefix_cache_hits - hits == PLACES


@pytest.mark.parametrize("dtype", [
    "bfloat16",
    pytest.param("float32", marks=pytest.mark.slow),
])  # fmt: skip
def test_decode_steps_are_recorded(twin: Twin, dtype: Dtype) -> None:
    """Recorded steps give what steps from Python give."""
    found = []
    for is_eager in (False, True):
        config = EngineConfig(
            model=str(twin.directory), dtype=dtype, num_threads=1, enforce_eager=is_eager
        )
        core = EngineCore.load(config)
        found.append(texts(core, *(asked(twin, n, stamped=False)[0] for n in range(3))))
        programs = core._runner._graphs  # pyright: ignore
        assert (programs is None) == is_eager
        if dtype == "bfloat16" and programs is not None:
            assert programs._programs
    assert found[0] == found[1]


@pytest.mark.parametrize(("options", "reason"), [
    ({"max_audio_clips": 0}, "max_audio_clips 0"),
    ({"tensor_parallel_size": 2}, "2 ranks"),
    ({"max_model_len": PLACES}, "too short for whisper"),
    ({"cache": CacheConfig(block_size=48, num_blocks=9)}, "not made of blocks of 48"),
])  # fmt: skip
def test_what_cannot_be_configured(twin: Twin, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        EngineCore.load(EngineConfig(model=str(twin.directory), num_threads=1, **options))


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(("change", "reason"), [
    ({"scale_embedding": True}, "scale_embedding"),
    ({"num_languages": 3}, "num_languages"),
    ({"decoder_attention_heads": 5}, "decoder_attention_heads"),
    ({"activation_function": "snake"}, "activation_function"),
    ({"encoder_attention_heads": 5}, "encoder_attention_heads"),
])  # fmt: skip
def test_configs_are_understood_or_refused(
    twin: Twin, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    for file in twin.directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.unlink()
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        EngineCore.load(EngineConfig(model=str(tmp_path), num_threads=1))


def test_prompts_must_be_transcriptions(twin: Twin) -> None:
    core = EngineCore.load(EngineConfig(model=str(twin.directory), num_threads=1))
    whole = transcribe("a", twin.directory, CLIPS[0], [SOT])
    sampling = SamplingParams(max_tokens=2)
    refused = [
        Request(id="b", prompt_token_ids=(5, 6), sampling=sampling),
        Request(id="c", prompt_token_ids=whole.prompt_token_ids[:PLACES], audio=whole.audio),
        Request(id="d", prompt_token_ids=(5, *whole.prompt_token_ids), audio=whole.audio * 2),
    ]
    for each in refused:
        with pytest.raises(InvalidParameter, match=r"only transcribes|ends with its clip"):
            core.add(each)
    long = [5] * MAX_TEXT
    with pytest.raises(ContextLengthExceeded):
        core.add(transcribe("e", twin.directory, np.zeros(RATE, np.float32) + 0.1, long))
