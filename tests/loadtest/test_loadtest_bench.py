"""Whole load tests, against the scripted server and our own."""

from __future__ import annotations

import argparse
import json
import random

import pytest

from loadtest.cli import build_parser, main, run
from loadtest.client import Client
from loadtest.driver import Endpoint, Load, send_all
from loadtest.models import ModelShape, ensure_model
from loadtest.workloads import SampleRequest
from tests.loadtest.scripted import Script, scripted_server

ASKS = [SampleRequest([1, 2, 3], 4 + index % 3) for index in range(20)]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
async def test_a_closed_loop_keeps_that_many_in_flight(concurrency):
    async with scripted_server(Script()) as server:
        client = Client(server.url)
        endpoint = Endpoint(False, "m", {})
        records = await send_all(client, endpoint, ASKS, Load(concurrency), random.Random(0))
        client.close()
    assert server.most_in_flight == min(concurrency, len(ASKS))
    assert [record.output_tokens for record in records] == [ask.max_tokens for ask in ASKS]


async def test_an_open_loop_sends_whatever_the_server_does():
    async with scripted_server(Script()) as server:
        client = Client(server.url)
        endpoint = Endpoint(True, "m", {})
        asks = [SampleRequest("a b", 2)] * 20
        records = await send_all(client, endpoint, asks, Load(rate=1000), random.Random(0))
        client.close()
    due = [record.due_s for record in records]
    assert due == sorted(due)
    assert len(set(due)) == 20
    assert all(record.sent_s >= record.due_s for record in records)


def options(server: Script, *more: str) -> argparse.Namespace:
    sizes = ("--input-len", "12", "--output-len", "5", "--num-requests", "6")
    return build_parser().parse_args(["--url", server.url, *sizes, *more])


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_is_a_positive_number(rate, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--rate", rate])
    assert f"'{rate}' is not a positive number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--rate", "soon", "'soon' is not a number"),
        ("--concurrency", "1,a", "must be an integer of at least 0, not 'a'"),
        ("--concurrency", "0", "must be at least 1, not '0'"),
        ("--num-requests", "0", "must be at least 1, not '0'"),
        ("--input-len", "-5", "must be an integer of at least 0, not '-5'"),
        ("--timeout-s", "0", "'0' is not a positive number"),
        ("--range-ratio", "5", "must be from 0 to 1, not '5'"),
    ],
)
def test_a_number_that_makes_no_load_is_refused_with_what_it_must_be(flag, value, told, capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"{flag}={value}"])
    assert capsys.readouterr().err.endswith(f": {told}\n")


@pytest.mark.parametrize(("fault", "said"), [("busy", "1 http_503"), ("error", "1 error_event")])
async def test_a_failure_is_told_with_what_the_server_said(fault, said, capsys):
    async with scripted_server(Script(fault=fault, every=6)) as server:
        assert await run(options(server, "--warmup", "0")) == 1
    words = {"busy": "busy", "error": "broken"}[fault]
    assert f"FAILED: {said}; the first: {words}\n" in capsys.readouterr().out


async def test_a_calibration_that_is_refused_says_why():
    async with scripted_server(Script(fault="busy", tokenizes=False)) as server:
        with pytest.raises(ValueError, match=r"calibration request failed \(http_503\): busy"):
            await run(options(server))


def test_of_several_keys_the_first_is_sent(monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "aaa,bbb")
    assert build_parser().parse_args([]).api_key == "aaa"


def test_the_address_is_that_of_the_other_commands(monkeypatch):
    monkeypatch.setenv("QUIRE_URL", "http://other:9000")
    assert build_parser().parse_args([]).url == "http://other:9000"
    assert build_parser().parse_args(["--url", "http://third:1"]).url == "http://third:1"
    monkeypatch.setenv("QUIRE_URL", "")
    assert build_parser().parse_args([]).url == "http://127.0.0.1:8000"


async def test_a_report_that_cannot_be_written_costs_no_result(tmp_path, capsys):
    async with scripted_server(Script()) as server:
        asked = options(server, "--concurrency", "1", "--json", str(tmp_path / "none" / "r.json"))
        with pytest.raises(ValueError, match=r"cannot write .*r\.json: No such file"):
            await run(asked)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]


async def test_bench_from_flags_to_json(tmp_path, capsys):
    html, file = tmp_path / "r.html", tmp_path / "r.json"
    async with scripted_server(Script()) as server:
        files = ("--html", str(html), "--json", str(file))
        asked = options(server, "--concurrency", "1,3", "--ignore-eos", *files)
        assert await run(asked) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(file.read_text())
    assert [each["load"]["concurrency"] for each in told["runs"]] == [1, 3]
    for each in told["runs"]:
        assert each["completed"] == 6
        assert each["output_tokens"] == each["output_events"] == 30
        assert each["prompt_tokens"] == 72
        assert each["server"]["generation_tokens"] == 30  # client and server agree
    assert "<svg" in html.read_text()
    sent = [body["prompt"] for body in server.asked]
    assert all(isinstance(prompt, list) and len(prompt) == 12 for prompt in sent)
    assert len({tuple(prompt) for prompt in sent}) == len(sent)  # no prompt is repeated, in any run


async def test_bench_tells_failures_and_fails(capsys):
    async with scripted_server(Script(fault="short", every=3)) as server:
        assert await run(options(server, "--ignore-eos", "--warmup", "0")) == 1
    out = capsys.readouterr().out
    assert "FAILED: 2 wrong_length" in out
    assert json.loads(out.splitlines()[-1])["runs"][0]["failures"] == {"wrong_length": 2}


async def test_bench_without_tokenize_sends_text_of_about_the_length(capsys):
    async with scripted_server(Script(tokenizes=False)) as server:
        assert await run(options(server, "--warmup", "0")) == 0
    calibration, *sent = server.asked
    assert len(calibration["prompt"].split()) == 100
    assert all(len(body["prompt"].split()) == 12 for body in sent)


def test_bench_without_a_server_says_so(capsys):
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    for address in ("nonsense://x", "host:port"):
        assert main(["--url", address]) == 1
        assert "is not an address" in capsys.readouterr().err


def test_bench_against_our_own_server(server, capsys):
    """The server's counters agree with the client's, and every stream is complete."""
    arguments = ["--url", server.url, "--num-requests", "4", "--concurrency", "2"]
    shape = ["--input-len", "40", "--output-len", "6", "--workload", "shared-prefix"]
    for endpoint in ("completions", "chat"):
        assert main([*arguments, *shape, "--endpoint", endpoint, "--ignore-eos"]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
        assert told["output_tokens"] == 24 == told["server"]["generation_tokens"]
        assert told["prompt_tokens"] == told["server"]["prompt_tokens"]
        assert 0 <= told["server"]["kv_waste"] < 1


def test_models_are_made_once_and_load(tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    shape = ModelShape("llama", 1, 16, 2, 1, 32, vocab=400)
    made = ensure_model(shape, tmp_path / "m", dtype="float32")
    weights = (made / "model.safetensors").read_bytes()
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert ensure_model(shape, tmp_path / "m", dtype="float32") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    again = ensure_model(shape, tmp_path / "other", dtype="float32")
    assert (again / "model.safetensors").read_bytes() == weights
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.config.vocab_size == 400
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    text = "any text: ünïcödé 😀\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
