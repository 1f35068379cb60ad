"""The settings of what operators do with a running server, which ``server/settings.py`` has."""

from __future__ import annotations

from pathlib import Path

from server.setting import SettingsPart, setting
from server.setting_values import Endpoint

OPERATION = "Operation"


class OperationSettings(SettingsPart):
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
    otlp_traces_endpoint: Endpoint | None = setting(
        None,
        OPERATION,
        "URL of an OpenTelemetry collector that takes spans over HTTP, such as "
        "http://localhost:4318: one for each request, its parent by traceparent. Needs the "
        "packages of quire[otel]. No tracing when left out.",
    )
