"""Where exporters place a text model's tensors within a model that sees or hears.

    language_model.model.layers.0.   model.language_model.layers.0.   model.layers.0.

A family's table of names (``names.py``) has the spelling that it was published in. Transformers
4.52 renamed the modules, and models that were tuned or quantised since may have the newer one.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.models.rules import Rule

# A parameter, the end of its name, and the spellings of what comes before.
_SPELLINGS = (
    ("embedding", "embed_tokens.weight", ("model.language_model.", "language_model.model.")),
    ("head", "weight", ("language_model.lm_head.", "lm_head.")),
)


def speller(rules: tuple[Rule, ...]) -> Callable[[str], str]:
    """Return a function that gives a tensor's name in the spelling of a family's rules."""
    patterns = {rule.parameter: rule.pattern for rule in rules}
    places: dict[str, str] = {}
    for parameter, end, spellings in _SPELLINGS:
        pattern = patterns.get(parameter, "")
        if pattern.endswith(end):
            own = pattern.removesuffix(end)
            places |= {other: own for other in spellings if other != own}

    def spell(name: str) -> str:
        for other, own in places.items():
            if name.startswith(other):
                return own + name.removeprefix(other)
        return name

    return spell
