"""The part of ``server/settings.py`` for speculative decoding."""

from __future__ import annotations

from engine.config import DraftSampling, Speculation, SpeculationConfig
from engine.speculation.options import speculation_config
from server.setting import SettingsPart, setting

SPECULATION = "Speculation"


class SpeculationSettings(SettingsPart):
    """How draft tokens are proposed; see docs/speculation.md."""

    speculation: Speculation | None = setting(
        None,
        SPECULATION,
        "Draft tokens ahead and verify several in one step. They come from a draft model, "
        "layers of the checkpoint (mtp), an EAGLE head, n-grams of the text itself, or suffixes "
        "of it and of earlier outputs. Default: draft if --draft-model is given, else off. See "
        "docs/speculation.md.",
    )
    draft_model: str | None = setting(
        None,
        SPECULATION,
        "A small model with the same tokenizer, or an EAGLE head: a directory or a name on the "
        "Hub. Default with the embedded model: its own draft model.",
    )
    num_draft_tokens: int = setting(
        4, SPECULATION, "Most draft tokens per sequence and step.", ge=1, le=32
    )
    adaptive_drafts: bool = setting(
        True,
        SPECULATION,
        "Draft as many tokens as pay for themselves, and none under load. If off, always draft "
        "the most.",
    )
    draft_sampling: DraftSampling = setting(
        "coupled",
        SPECULATION,
        "How draft tokens are accepted when sampling. coupled: the text for a seed is the same as "
        "without speculation; rejection: more are accepted, and the distribution is unchanged.",
    )
    prompt_lookup_max: int = setting(
        4, SPECULATION, "Longest run of tokens to look up (ngram, suffix).", ge=1, le=32
    )
    prompt_lookup_min: int = setting(
        2, SPECULATION, "Shortest run of tokens to look up (ngram, suffix).", ge=1, le=32
    )

    def speculation_config(self, *, is_embedded: bool) -> SpeculationConfig | None:
        """The engine's config of speculation; None disables it."""
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
