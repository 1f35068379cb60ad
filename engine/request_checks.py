"""Checks whether a model can serve a request."""

from __future__ import annotations

from engine.audio.speech import SpeechRules
from engine.audio.types import AudioRules
from engine.errors import InvalidParameter
from engine.types import EngineInfo, Request


def check_kind(request: Request, info: EngineInfo) -> None:
    """Check that the model can do what the request asks for.

    A model that does not generate makes vectors only. One that does may also make vectors, and may
    take images or audio in its prompts.

    Raises:
        InvalidParameter: it cannot.
    """
    pooling, can = request.pooling, info.pooling
    if request.images and (pooling is not None or info.images is None):
        raise InvalidParameter("images are not taken", param="messages")
    if request.audio and (pooling is not None or info.audio is None):
        raise InvalidParameter("audio is not taken", param="messages")
    if info.audio is not None and info.audio.transcription.speech is not None:
        _check_transcription(request, info.audio)
    if pooling is None:
        if not info.is_generative:
            raise InvalidParameter("this model does not generate text", param="model")
    elif can is None:
        raise InvalidParameter("this model makes no embeddings", param="model")
    elif pooling.use_score_head and not can.num_labels:
        raise InvalidParameter("this model has no head that scores", param="model")
    elif pooling.score_tokens != (can.score_tokens if pooling.use_score_head else ()):
        raise InvalidParameter("this model scores by other tokens", param="model")
    elif pooling.dimensions is not None and pooling.dimensions > can.size:
        problem = f"'dimensions' must be at most {can.size}, the size of this model's embeddings"
        raise InvalidParameter(problem, param="dimensions")


def _check_transcription(request: Request, rules: AudioRules) -> None:
    """Check that the prompt begins with one clip, which the text behind it attends to."""
    clips = request.audio
    if request.pooling is not None:
        raise InvalidParameter("this model makes no embeddings", param="model")
    most = rules.num_tokens(rules.pad_samples)
    if len(clips) != 1 or clips[0].start or clips[0].num_tokens != most:
        problem = "this model only transcribes: a prompt is one clip and what follows it"
        raise InvalidParameter(problem, param="model")
    if len(request.prompt_token_ids) <= most:
        raise InvalidParameter("the prompt ends with its clip", param="prompt")


def _speech_ids(speech: SpeechRules | None) -> tuple[int, ...]:
    if speech is None:
        return ()
    stamps = speech.timestamps
    marks = () if stamps is None else (stamps.begin, stamps.text_end)
    return (*speech.suppressed, *speech.begin_suppressed, *marks)


def check_tokens(request: Request, size: int) -> None:
    """Raise InvalidParameter if token ids lie outside a vocabulary of ``size`` tokens."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    for param, ids in (
        ("prompt", prompt),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [id_ for word in sampling.bad_token_ids for id_ in word]),
        ("speech", _speech_ids(sampling.speech)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise InvalidParameter(
                f"'{param}' has token ids outside the vocabulary of {size} tokens", param=param
            )
