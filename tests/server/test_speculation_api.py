"""Speculation over HTTP: the same answers, with counters, also across a crash of the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.paths import embedded_draft_dir
from tests.servers import Server, running_server

QUESTIONS = ("What is the capital of France?", "Tell me a short story.", "What is 7 plus 5?")
SAMPLED = {"temperature": 0.9, "seed": 11, "max_tokens": 40}
NUM_CLIENTS = 9
CALLS = ({}, SAMPLED, {**SAMPLED, "n": 2, "stop": ["."]}, {"logprobs": True, "top_logprobs": 2})


def answers(server: Server) -> list[list]:
    """What clients see, apart from usage and ids."""
    told = []
    for question in QUESTIONS:
        for fields in CALLS:
            body = server.chat(question, **fields).raise_for_status().json()
            told.append([(c["message"]["content"], c["finish_reason"]) for c in body["choices"]])
    return told


def choices(server: Server, index: int) -> list[str]:
    fields = {"n": 3, "seed": index, "max_tokens": 60, "ignore_eos": True}
    fields["temperature"] = 0.8 * (index % 2)
    answer = server.chat(QUESTIONS[index % 3] + " Please." * (index // 3), **fields)
    return [choice["message"]["content"] for choice in answer.raise_for_status().json()["choices"]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[list[list], list[list[str]]]:
    """Answers, and choices, without speculation and sequentially."""
    with running_server(tmp_path_factory.mktemp("plain") / "log", "--dtype", "float32") as server:
        return answers(server), [choices(server, index) for index in range(NUM_CLIENTS)]


@pytest.mark.parametrize("method", ["draft", pytest.param("ngram", marks=pytest.mark.slow)])
def test_answers_are_the_same_and_drafts_are_counted(tmp_path, plain, method):
    if method == "draft" and embedded_draft_dir() is None:
        pytest.skip("no draft model ships with this checkout")
    expected, _ = plain
    flags = ("--speculation", method, "--no-adaptive-drafts", "--prompt-lookup-min", "1")
    with running_server(tmp_path / "log", "--dtype", "float32", *flags) as server:
        assert answers(server) == expected
        metrics = server.metrics()
        drafts, kept = (
            metrics[f"spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted")
        )
        assert drafts > kept > 0
        per_place = [
            metrics[f"spec_decode_num_accepted_tokens_per_pos_total{{{at}}}"] for at in range(4)
        ]
        assert sum(per_place) == kept
        assert sorted(per_place, reverse=True) == per_place
        usage = server.chat(QUESTIONS[0]).json()["usage"]
        details = usage["completion_tokens_details"]
        assert 0 <= details["accepted_prediction_tokens"] < usage["completion_tokens"]
        assert details["rejected_prediction_tokens"] >= 0
        server.engines()[0].kill()
        server.wait_for(lambda m: m["engine_restarts_total"] >= 1, "a restart")
        assert answers(server) == expected


@pytest.mark.parametrize("method", ["draft", pytest.param("suffix", marks=pytest.mark.slow)])
def test_several_workers_and_too_few_blocks_change_no_choice(tmp_path, plain, method):
    """Two API processes share one engine; choices share prompts, and are preempted."""
    _, crowd = plain
    flags = ("--speculation", method, "--api-workers", "2", "--num-gpu-blocks-override", "48")
    flags += ("--dtype", "float32", "--no-adaptive-drafts", "--prompt-lookup-min", "1")
    with running_server(tmp_path / "log", *flags) as server:
        clients = [Server(server.process, server.port, server.log) for _ in crowd]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            told = list(pool.map(choices, clients, range(NUM_CLIENTS)))
        for client in clients:
            client.close()
        assert told == crowd
        metrics = server.wait_idle()
        assert metrics["num_preemptions_total"] > 0
        assert metrics["spec_decode_num_accepted_tokens_total"] > 0
