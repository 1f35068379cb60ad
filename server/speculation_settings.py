"""The settings of speculation, which ``server/settings.py`` has among its own."""

from __future__ import annotations

from typing import Protocol

from pydantic_settings import BaseSettings

from engine.config import DraftSampling, Speculation, SpeculationConfig
from engine.paths import embedded_draft_dir
from server.setting import setting

SPECULATION = "Speculation"


class SpeculationSettings(BaseSettings):
    """How tokens are guessed ahead; see docs/speculation.md."""

    speculation: Speculation | None = setting(
        None,
        SPECULATION,
        "Guess tokens ahead and verify several in one step: by a draft model, by n-grams of the "
        "text itself, or by suffixes of it and of earlier outputs. When left out: draft where "
        "--draft-model is given, else off.",
    )
    draft_model: str | None = setting(
        None,
        SPECULATION,
        "Directory of a small model with the same tokenizer. When left out: the embedded model's "
        "own draft.",
    )
    num_draft_tokens: int = setting(
        4, SPECULATION, "Most tokens guessed for a sequence in one step.", ge=1, le=32
    )
    adaptive_drafts: bool = setting(
        True,
        SPECULATION,
        "Guess as many tokens as pay for themselves, none when busy; else always the most.",
    )
    draft_sampling: DraftSampling = setting(
        "coupled",
        SPECULATION,
        "How guesses of sampled texts are judged: coupled leaves each seed's text as it is without "
        "speculation, rejection keeps the most guesses and leaves the distribution as it is.",
    )
    prompt_lookup_max: int = setting(
        4, SPECULATION, "Longest run of tokens that is looked up (ngram, suffix).", ge=1, le=32
    )
    prompt_lookup_min: int = setting(
        2, SPECULATION, "Shortest run of tokens that is looked up.", ge=1, le=32
    )


class _Read(Protocol):
    """What of the settings is read here."""

    model: str | None
    speculation: Speculation | None
    draft_model: str | None
    num_draft_tokens: int
    adaptive_drafts: bool
    draft_sampling: DraftSampling
    prompt_lookup_max: int
    prompt_lookup_min: int


def speculation_config(settings: _Read) -> SpeculationConfig | None:
    """What the engine is told of speculation; None: there is none."""
    method = settings.speculation or ("draft" if settings.draft_model else None)
    if method is None:
        return None
    draft_model = settings.draft_model
    if draft_model is None and settings.model is None:
        embedded = embedded_draft_dir()
        draft_model = None if embedded is None else str(embedded)
    return SpeculationConfig(
        method=method,
        draft_model=settings.draft_model if method != "draft" else draft_model,
        num_draft_tokens=settings.num_draft_tokens,
        max_ngram=settings.prompt_lookup_max,
        min_ngram=min(settings.prompt_lookup_min, settings.prompt_lookup_max),
        draft_sampling=settings.draft_sampling,
        adaptive=settings.adaptive_drafts,
    )
