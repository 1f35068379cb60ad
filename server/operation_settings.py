"""The part of ``server/settings.py`` for operating a running server."""

from __future__ import annotations

from pathlib import Path

from server.setting import SettingsPart, setting
from server.setting_values import Endpoint

OPERATION = "Operation"


class OperationSettings(SettingsPart):
    """Which operators' routes are enabled; see docs/sleep.md."""

    enable_sleep_mode: bool = setting(
        False,
        OPERATION,
        "Turn on the routes that put the server to sleep, wake it and reload its weights: "
        "/sleep, /wake_up, /is_sleeping, /reload_weights. See docs/sleep.md.",
    )
    weights_dir: Path | None = setting(
        None,
        OPERATION,
        "Directory from which /reload_weights may load other weights of the same model. Without "
        "it, only those of MODEL can be read again.",
    )
    otlp_traces_endpoint: Endpoint | None = setting(
        None,
        OPERATION,
        "URL of an OpenTelemetry collector that accepts spans over HTTP, such as "
        "http://localhost:4318. Each request makes one span, whose parent comes from "
        "traceparent. Needs the extra otel, see docs/tracing.md. Default: no tracing.",
    )
