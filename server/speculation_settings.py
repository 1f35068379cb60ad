"""The settings of speculation, which ``server/settings.py`` has among its own."""

from __future__ import annotations

from engine.config import DraftSampling, Speculation, SpeculationConfig
from engine.speculation.options import speculation_config
from server.setting import SettingsPart, setting

SPECULATION = "Speculation"


class SpeculationSettings(SettingsPart):
    """How tokens are guessed ahead; see docs/speculation.md."""

    speculation: Speculation | None = setting(
        None,
        SPECULATION,
        "Guess tokens ahead and verify several in one step: by a draft model, by a head of the "
        "model's own checkpoint (mtp), by an EAGLE head, by n-grams of the text itself, or by "
        "suffixes of it and of earlier outputs. When left out: draft where --draft-model is given, "
        "else off.",
    )
    draft_model: str | None = setting(
        None,
        SPECULATION,
        "Directory of a small model with the same tokenizer, or of an EAGLE head. When left out: "
        "the embedded model's own draft.",
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

    def speculation_config(self, *, is_embedded: bool) -> SpeculationConfig | None:
        """What the engine is told of speculation; None: there is none."""
        return speculation_config(
            self.speculation,
            self.draft_model,
            is_embedded=is_embedded,
            num_draft_tokens=self.num_draft_tokens,
            max_ngram=self.prompt_lookup_max,
            min_ngram=min(self.prompt_lookup_min, self.prompt_lookup_max),
            draft_sampling=self.draft_sampling,
            adaptive=self.adaptive_drafts,
        )
