"""schemathesis on our own document: what it allows clients to send, and what it does not.

Every operation of /openapi.json, including those that settings enable, is called with values that
match its description and with values that do not. No response may be a 5xx, and none may have a
status, media type or schema that the document does not describe.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from engine.config import EngineConfig
from engine.process import SubprocessClient
from server.app import create_app
from server.settings import Settings
from tests.servers import MODEL, Server, running_server

KEY = "sk-fuzz"
FLAGS = (
    *("--load-format", "stub", "--max-model-len", "64", "--max-queued-requests", "4096"),
    *("--body-timeout-s", "2", "--disable-log-requests"),
)


def switches(home: Path) -> dict[str, Any]:
    """The settings that enable routes, with the files they need in a directory."""
    keys = home / "keys.yaml"
    keys.write_text("keys: []")
    return {
        "enable_sleep_mode": True,
        "weights_dir": str(home),
        "lora_dir": str(home),
        "profile": str(home / "profiles"),
        "api_key_file": str(keys),
    }


def document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(api_keys=[KEY], **switches(Path(home)))
        app = create_app(settings, SubprocessClient(EngineConfig(model="none")))
    return app.openapi()


SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {
    operation.label: operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
}
MODES = {mode.value: mode for mode in schemathesis.GenerationMode}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("fuzzed")
    config = home / "on.yaml"
    config.write_text(json.dumps(switches(home)))
    flags = (*FLAGS, "--data-dir", str(home), "--config", str(config))
    with running_server(home / "log", *flags, key=KEY) as server:
        yield server


@pytest.fixture(autouse=True)
def awake(fuzzed: Server) -> Iterator[None]:
    yield
    assert fuzzed.post("/wake_up", None).status_code == 200


def check(server: Server, label: str, mode: str, max_examples: int) -> None:
    """Call one operation with generated requests."""

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(MODES[mode]))
    def run(case: Any) -> None:
        if mode == "positive":
            _lead_on(case)
        case.call_and_validate(
            base_url=server.url,
            headers={"authorization": f"Bearer {KEY}"},
            excluded_checks=_excluded(label),
        )

    # If nothing can be wrong with a request, there is nothing to generate.
    with contextlib.suppress(Unsatisfiable):
        run()


def _lead_on(case: Any) -> None:
    """Remove what would make nearly every request fail early."""
    for name in [name for name in case.headers if name.lower() == "x-quire-deadline-ms"]:
        del case.headers[name]
    if isinstance(case.body, dict):
        case.body.pop("deadline_ms", None)
        if "model" in case.body:
            case.body["model"] = MODEL


def _excluded(label: str) -> list[Any]:
    # Valid requests may still be rejected, for a model's vocabulary or by rules over several
    # fields. Other methods and missing keys have their own tests. A query may have more names than
    # are checked.
    names = ["positive_data_acceptance", "unsupported_method", "ignored_auth"]
    if label.startswith(("GET ", "DELETE ", "POST /sleep", "POST /wake_up")):
        names.append("negative_data_rejection")
    checks = schemathesis.checks.CHECKS
    return [check for name in names for check in checks.get_by_names([name])]


STREAMED: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "POST /v1/completions": {"prompt": "Hello", "logprobs": 1},
    "POST /v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    "POST /v1/responses": {"input": "Hello"},
}


@pytest.mark.parametrize("label", STREAMED)
def test_events_of_a_stream_are_as_described(fuzzed: Server, label: str) -> None:
    """Few generated requests are answered by a stream."""
    body = {"model": MODEL, "stream": True, **STREAMED[label]}
    case = OPERATIONS[label].Case(body=body, media_type="application/json")
    headers = {"authorization": f"Bearer {KEY}"}
    answer = case.call(base_url=fuzzed.url, headers=headers)
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, excluded_checks=_excluded(label))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_undescribed(fuzzed: Server, label: str, mode: str) -> None:
    check(fuzzed, label, mode, max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_undescribed_however_long_one_tries(
    fuzzed: Server, label: str, mode: str
) -> None:
    check(fuzzed, label, mode, max_examples=300)
