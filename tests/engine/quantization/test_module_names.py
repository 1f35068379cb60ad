"""Module names and patterns in a checkpoint's config: hostile ones fail with one line."""

from __future__ import annotations

import time

import pytest

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.quantization.formats import module_names
from engine.quantization.formats.module_names import ModuleNames

MODULES = [f"model.layers.{i}.{part}" for i in range(3) for part in ("mlp.gate", "mlp.gate_proj")]


def names(*words: str) -> ModuleNames:
    return ModuleNames.read(ConfigReader({"ignore": list(words)}, "config.json"), "ignore")


def test_names_are_whole_and_patterns_are_for_the_beginning() -> None:
    assert names().matching(MODULES) == frozenset()
    assert names("model.layers.0.mlp.gate", "lm_head").matching(MODULES) == {MODULES[0]}
    assert names("re:.*gate$").matching(MODULES) == set(MODULES[::2])
    assert names("re:model.layers.1", "model.layers.0.mlp.gate").matching(MODULES) == {
        *MODULES[2:4],
        MODULES[0],
    }
    assert names(r"re:(?!.*_proj)model").matching(MODULES) == set(MODULES[::2])  # with a lookahead
    assert names("re:layers").matching(MODULES) == frozenset()
    assert "Linear" in names("Linear", "re:.*")


@pytest.mark.parametrize(
    "pattern", ["(.*)*(.*)*(.*)*!", r"(model|mod|el|[.a-z0-9_]+)+!", "((a?.?){99}){99}!"]
)
def test_a_pattern_that_never_ends_ends_the_load(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_names, "_LIMIT_S", 0.5)
    begin_s = time.monotonic()
    with pytest.raises(ModelLoadError) as refusal:
        names("lm_head", "re:.*x", f"re:{pattern}").matching(
            [module + "a" * 40 for module in MODULES]
        )
    assert time.monotonic() - begin_s < 30
    told = str(refusal.value)
    assert told.startswith("config.json: 'ignore' has patterns that take ")
    assert "'.*x' and 1 more" in told
    assert "\n" not in told


@pytest.mark.parametrize("pattern", ["(", "a**", "(?P<a>", "(" * 5000, "\ud800*("])
def test_what_is_no_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ModelLoadError, match=r"config.json: 'ignore' has ") as refusal:
        names(f"re:{pattern}").matching(MODULES)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300
