"""Fixtures shared by all tests: real servers on the demo model, started once a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from unittest import mock

import pytest
from hypothesis import settings

from engine import child
from engine.gc_tuning import collection_paused
from tests.forked import EngineStarts
from tests.servers import Server, running_server
from tests.thinned import mark_thinned

# The files that take longest, in that order. Many of them wait for servers most of the time, which
# leaves cores idle unless others compute meanwhile.
_LONG = (
    *("test_triton_interpreter.py", "test_runner.py", "test_pretended_gpu.py"),
    *("test_tensor_parallel.py", "test_lora.py", "test_parity.py", "test_states_server.py"),
    *("test_draft_head_texts.py", "test_triton_aot.py", "test_lifecycle.py"),
    *("test_text_parser.py", "test_workers.py", "test_tools_bench.py", "test_programs.py"),
    *("test_state_drafts.py", "test_nodes.py", "test_lora_api.py", "test_states.py"),
    *("test_data_parallel.py", "test_openapi_fuzz.py", "test_shared_states.py"),
    *("test_speculation_api.py", "test_images_server.py", "test_cpu_attention.py"),
    *("test_system_faults.py", "test_staged_kinds.py", "test_sleep.py"),
    *("test_gguf_models.py", "test_text_grammar.py", "test_dashboard.py"),
    *("test_responses_store.py", "test_batches.py", "test_crashes.py"),
    *("test_cli_run_batch.py", "test_pipeline_parallel.py", "test_formats.py"),
    *("test_demo_corpus.py", "test_keys.py", "test_images.py", "test_lives.py"),
    *("test_bad_inputs.py", "test_shared_gemmas.py", "test_speculation.py"),
    *("test_beam_search.py",),
)

# An example may take as long as other work on the machine makes it.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the collector the million objects that imports leave, now and in all tests."""
    with collection_paused():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before a marker expression chooses among them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, then those with the most tests.

    ``make test`` hands out files in this order.
    """
    mark_thinned(items)
    counts = Counter(item.path for item in items)
    ranks = {name: rank for rank, name in enumerate(_LONG)}
    items.sort(key=lambda item: (ranks.get(item.path.name, len(_LONG)), -counts[item.path]))


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """Fork the engine processes that tests start."""
    with mock.patch.object(child, "subprocess", EngineStarts):
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An open server with default limits, except for 1,024 KV blocks."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(log) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    """The address of ``server`` for the openai SDK."""
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with API keys, strict mode and tight limits."""
    log = tmp_path_factory.mktemp("guarded") / "server.log"
    flags = (
        *("--strict", "--max-num-seqs", "2", "--max-queued-requests", "2"),
        *("--header-timeout-s", "1", "--body-timeout-s", "1", "--heartbeat-s", "0.05"),
        *("--api-key", "another-key", "--max-body-bytes", "1MiB"),
    )
    with running_server(log, *flags, key="sk-test-0123456789") as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Add the servers' logs to the report of a failed test that used one."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server):
                report.sections.append(("server log", value.tail()))
    return report
