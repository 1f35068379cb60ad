"""Adapters over HTTP: by name, at startup and at run time, across a crash, with the admin scope."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from engine.paths import default_model_dir
from tests.hub import fake_hub
from tests.server.test_workers import connections, wait_for_workers, workers_of
from tests.servers import MODEL, ROOT, Server, running_server

peft = pytest.importorskip("peft")

QUESTION = "What is the capital of France?"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """name -> (directory, the merged model's answer to QUESTION)."""
    import torch
    import transformers

    root = tmp_path_factory.mktemp("adapters")
    directory = default_model_dir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = {}
    for seed, name in enumerate(("one", "two")):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS)
            adapted = peft.get_peft_model(model, options)
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data.normal_(0, 0.3)
            adapted.save_pretrained(root / name)
            merged = adapted.merge_and_unload()
        output = merged.generate(**prompt, max_new_tokens=12, do_sample=False)
        told = output[0, prompt["input_ids"].shape[1] :]
        made[name] = root / name, tokenizer.decode(told, skip_special_tokens=True)
    assert made["one"][1] != made["two"][1]
    return made


@pytest.fixture(scope="module")
def lora_server(
    adapters: dict[str, tuple[Path, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with one adapter from the start, and the other on the Hub and in a directory to
    load from."""
    home = tmp_path_factory.mktemp("lora-server")
    shutil.copytree(adapters["two"][0], home / "shelf" / "two")
    (home / "shelf" / "circle").symlink_to("circle")
    flags = (
        *("--lora", f"one={adapters['one'][0]}", "--lora", "downloaded=org/two"),
        *("--lora-dir", str(home / "shelf"), "--dtype", "float32"),
    )
    files = {path.name: path.read_bytes() for path in adapters["two"][0].iterdir()}
    with fake_hub({"org/two": files}) as hub:
        environment = hub.environment(home / "hub")
        with running_server(home / "server.log", *flags, environment=environment) as running:
            yield running


def ask(lora_server: Server, model: str) -> str:
    answer = lora_server.chat(QUESTION, model=model, max_tokens=12)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["message"]["content"]


def test_an_adapter_is_a_model_by_its_name(
    lora_server: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    plain = ask(lora_server, MODEL)
    assert ask(lora_server, "one") == adapters["one"][1]
    assert ask(lora_server, MODEL) == plain == "The capital of France is Paris."
    with openai.OpenAI(base_url=f"{lora_server.url}/v1", api_key="none") as client:
        cards = {card.id: card.to_dict() for card in client.models.list()}
        assert cards["one"]["parent"] == MODEL
        assert client.models.retrieve("one").id == "one"
    streamed = lora_server.complete("The capital of", model="one", stream=True)
    assert '"model":"one"' in streamed.text
    answer = lora_server.post("/tokenize", {"model": "one", "prompt": "The capital"})
    body = {"model": "one", "tokens": answer.json()["tokens"]}
    text = lora_server.post("/detokenize", body).json()
    assert text["prompt"].endswith("The capital")
    assert lora_server.post("/tokenize", {"model": "no", "prompt": "a"}).status_code == 404


def test_an_adapter_of_the_hub_is_downloaded(
    lora_server: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    assert ask(lora_server, "downloaded") == adapters["two"][1]


def test_the_metrics_name_the_adapters_in_use(lora_server: Server) -> None:
    """Under the labels that inference gateways use for routing."""

    def labels() -> dict[str, str]:
        (line,) = re.findall(r"lora_requests_info\{(.*)\}", lora_server.get("/metrics").text)
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    idle = {"max_lora": "8", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    lora_server.wait_idle()
    assert labels().items() >= idle.items()
    body = {"model": "one", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{lora_server.url}/v1/completions", json=body | {"stream": True}
    ) as a:
        lines = a.iter_lines()
        next(lines)
        assert labels()["running_lora_adapters"] == "one"
    lora_server.wait_idle()
    assert labels().items() >= idle.items()


def test_an_adapter_comes_and_goes(
    lora_server: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    assert lora_server.chat(model="two").status_code == 404
    loaded = lora_server.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"})
    assert loaded.status_code == 200, loaded.text
    assert ask(lora_server, "two") == adapters["two"][1]
    assert ask(lora_server, "one") == adapters["one"][1]
    assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status_code == 200
    assert lora_server.chat(model="two").status_code == 404
    assert lora_server.post("/v1/unload_lora_adapter", {"lora_name": "two"}).status_code == 404


@pytest.mark.parametrize(
    "path", ["../one", "/etc", "https://example.com/a", "no", "two\0", "a" * 999, "circle"]
)
def test_nothing_is_loaded_from_elsewhere(lora_server: Server, path: str) -> None:
    answer = lora_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["code"] == "model_not_found"


def test_what_is_no_adapter_is_refused_and_harms_nobody(
    lora_server: Server, tmp_path: Path
) -> None:
    shelf = lora_server.log.parent / "shelf"
    (shelf / "empty").mkdir()
    answer = lora_server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "empty"})
    assert answer.status_code == 400, answer.text
    assert "adapter_config.json" in answer.json()["error"]["message"]
    assert str(shelf) not in answer.text
    answer = lora_server.post("/v1/load_lora_adapter", {"lora_name": MODEL, "lora_path": "two"})
    assert answer.status_code == 400
    assert lora_server.chat(model="x").status_code == 404
    lora_server.wait_idle()


def test_adapters_outlive_the_engine(
    lora_server: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    """A restarted engine loads the adapters named by requests again, unless they are others now."""
    assert ask(lora_server, "one") == adapters["one"][1]
    shelf = lora_server.log.parent / "shelf"
    shutil.copytree(adapters["two"][0], shelf / "latest")
    latest = {"lora_name": "latest", "lora_path": "latest"}
    assert lora_server.post("/v1/load_lora_adapter", latest).status_code == 200
    assert ask(lora_server, "latest") == adapters["two"][1]
    for file in adapters["one"][0].iterdir():
        shutil.copy(file, shelf / "latest" / file.name)
    lora_server.engines()[0].kill()
    lora_server.wait_for(lambda m: m["engine_restarts_total"] >= 1, "a restart")
    assert ask(lora_server, "one") == adapters["one"][1]
    refused = lora_server.chat(QUESTION, model="latest", max_tokens=12)
    assert refused.status_code == 400
    assert "have changed since it was loaded" in refused.json()["error"]["message"]
    assert lora_server.post("/v1/load_lora_adapter", latest).status_code == 200
    assert ask(lora_server, "latest") == adapters["one"][1]


@pytest.fixture(scope="module")
def two_workers(
    adapters: dict[str, tuple[Path, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The same with two API workers."""
    home = tmp_path_factory.mktemp("lora-workers")
    shutil.copytree(adapters["two"][0], home / "shelf" / "two")
    (home / "shelf" / "circle").symlink_to("circle")
    flags = ("--lora", f"one={adapters['one'][0]}", "--lora-dir", str(home / "shelf"))
    flags = (*flags, "--dtype", "float32", "--api-workers", "2")
    with running_server(home / "server.log", *flags) as running:
        wait_for_workers(running)
        yield running


@contextmanager
def connected(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A connection to each of two workers."""
    workers = workers_of(server)
    with contextlib.ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        while len(found) < 2:  # the kernel distributes connections
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            stream = client.get("/ready").extensions["network_stream"]
            port = stream.get_extra_info("client_addr")[1]
            for worker in workers:
                if port in connections(worker):
                    found[worker.pid] = client
        yield tuple(found.values())


def answer_of(client: httpx.Client, model: str) -> str | None:
    """The adapter's answer to QUESTION; None if there is no such model."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 12}
    answer = client.post("/v1/chat/completions", json=body)
    if answer.status_code == 404:
        return None
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def load(client: httpx.Client, name: str) -> None:
    body = {"lora_name": name, "lora_path": "two"}
    answer = client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


def unload(client: httpx.Client, name: str) -> int:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def test_what_one_worker_loads_and_unloads_the_other_knows_at_once(
    two_workers: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    with connected(two_workers) as pair:
        for turn in range(6):
            here, there = pair if turn % 2 else pair[::-1]
            assert answer_of(there, "one") == adapters["one"][1]
            load(here, f"two-{turn}")
            assert answer_of(there, f"two-{turn}") == adapters["two"][1]
            cards = there.get("/v1/models").json()["data"]
            assert [card["id"] for card in cards] == [MODEL, "one", f"two-{turn}"]
            assert unload(there, f"two-{turn}") == 200
            assert answer_of(here, f"two-{turn}") is None
            assert unload(here, f"two-{turn}") == 404


def test_a_worker_that_takes_anothers_place_knows_what_was_loaded(
    two_workers: Server, adapters: dict[str, tuple[Path, str]]
) -> None:
    """An adapter that was unloaded since the start does not return with the new worker."""
    with connected(two_workers) as (here, _):
        load(here, "two")
        assert unload(here, "one") == 200
    (victim, _) = workers_of(two_workers)
    victim.kill()
    victim.wait()
    wait_for_workers(two_workers)
    with connected(two_workers) as pair:
        for client in pair:
            assert answer_of(client, "two") == adapters["two"][1]
            assert answer_of(client, "one") is None


def test_without_a_directory_there_is_no_such_route(base_url: str) -> None:
    answer = httpx.post(
        f"{base_url}/load_lora_adapter", json={"lora_name": "x", "lora_path": "x"}, timeout=30
    )
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.slow
def test_a_bad_adapter_ends_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--lora", f"x={tmp_path}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "--lora x: the adapter cannot be used: peft_type is None" in done.stderr
    assert "Traceback" not in done.stderr
