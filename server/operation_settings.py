"""The settings of what operators do with a running server, which ``server/settings.py`` has."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings

from server.setting import setting

OPERATION = "Sleep and weights"


class OperationSettings(BaseSettings):
    """Which routes there are for operators; see docs/sleep.md."""

    enable_sleep_mode: bool = setting(
        False,
        OPERATION,
        "Have the routes that put the server to sleep, wake it and reload its weights: /sleep, "
        "/wake_up, /is_sleeping, /reload_weights.",
    )
    weights_dir: Path | None = setting(
        None,
        OPERATION,
        "Directory from which /reload_weights may take other weights of the same model; when left "
        "out, it can only read those of MODEL again.",
    )
