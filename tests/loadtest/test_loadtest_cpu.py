"""The CPU benchmark: its lower bounds, its checkpoints for peers, its rounds and its gates."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loadtest.cpu import __main__ as program
from loadtest.cpu.ceilings import Ceilings
from loadtest.cpu.checkpoints.gguf import ensure_gguf
from loadtest.cpu.checkpoints.w8a8 import ensure_w8a8
from loadtest.cpu.gates import evaluate_gates
from loadtest.cpu.loads import MAIN, OVERHEAD, PREFIX, CpuLoad, floor_s
from loadtest.cpu.published import scaled_tokens_per_s
from loadtest.cpu.rounds import measure_load
from loadtest.cpu.scaling import measure_scaling, write_charts
from loadtest.models import SHAPES, ModelShape, ensure_model
from loadtest.process import RunningServer
from tests.loadtest.scripted import Script, scripted_server

ZEN_4 = Ceilings(28.6e9, 415e9, 658e9)
SMALL = ModelShape("llama", 2, 64, 4, 2, 96, vocab=400)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    return ensure_model(SMALL, tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def scripted() -> Iterator[Script]:
    """The scripted server in a thread, since the code under test runs its own event loops."""
    started, script = threading.Event(), Script()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with scripted_server(script):
            started.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    yield script
    loop.call_soon_threadsafe(ending.set)
    thread.join()
    loop.close()


# ---------------------------------------------------------------- floors and peers' figures


@pytest.mark.parametrize(
    ("model", "bits", "concurrency", "tokens_per_s"),
    [("0.5b", 16, 16, 114), ("0.5b", 8, 16, 181), ("0.5b", 16, 1, 29.4), ("100m", 16, 16, 496)],
)
def test_floors_agree_with_those_worked_out_by_hand(model, bits, concurrency, tokens_per_s):
    load = next(load for load in MAIN if load.concurrency == concurrency)
    floor = load.output_tokens / floor_s(SHAPES[model], load, bits, ZEN_4)
    assert floor == pytest.approx(tokens_per_s, rel=0.01)


def test_a_peers_figure_scales_with_the_machine():
    twice = Ceilings(*(2 * value for value in (28.6e9, 415e9, 658e9)))
    told = scaled_tokens_per_s("0.5b", "vllm bf16", MAIN[2], ZEN_4)
    assert told == (pytest.approx(92.0), "scaled 1.00x")
    told = scaled_tokens_per_s("0.5b", "vllm bf16", MAIN[2], twice)
    assert told == (pytest.approx(184.0), "scaled 2.00x")
    overhead = scaled_tokens_per_s("tiny", "vllm bf16", OVERHEAD[1], twice)
    assert overhead == (2048.0, "figure of another machine")
    assert scaled_tokens_per_s("100m", "vllm w8a8", MAIN[0], twice) is None


def test_a_shared_prefix_is_sent_alone_first():
    import random

    first, rest = PREFIX[0].waves(32_000, random.Random(0))
    assert (len(first), len(rest)) == (1, 16)
    prompts = [ask.prompt for ask in first + rest]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 17
    assert {len(prompt) for prompt in prompts} == {1088}


# ---------------------------------------------------------------- checkpoints


def read_gguf(path: Path) -> tuple[dict, dict]:
    """The metadata and tensors (type and bytes) of a GGUF file, by the format's definition."""
    data, at = path.read_bytes(), 0

    def take(form: str):
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values[0]

    def text() -> str:
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int):
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return text() if kind == 8 else take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    assert data[:4] == b"GGUF"
    at = 4
    assert take("I") == 3
    num_tensors, num_entries = take("Q"), take("Q")
    metadata = {text(): value(take("I")) for _ in range(num_entries)}
    table = []
    for _ in range(num_tensors):
        name = text()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        table.append((name, shape, take("I"), take("Q")))
    begin = at + -at % 32
    bytes_per_block = {0: (1, 4), 30: (1, 2), 8: (32, 34), 2: (32, 18)}
    tensors = {}
    for name, shape, kind, offset in table:
        assert offset % 32 == 0
        weights, size = bytes_per_block[kind]
        length = int(np.prod(shape)) // weights * size
        tensors[name] = (shape, kind, data[begin + offset : begin + offset + length])
    return metadata, tensors


def dequantize(kind: int, raw: bytes) -> np.ndarray:
    if kind == 0:
        return np.frombuffer(raw, np.float32)
    if kind == 30:
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, {8: 34, 2: 18}[kind])
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[:, 2:]
    if kind == 8:
        return (scales * codes.copy().view(np.int8)).ravel()
    return (scales * (np.concatenate([codes & 15, codes >> 4], axis=1) - 8.0)).ravel()


@pytest.mark.parametrize(
    ("kind", "error"), [("bf16", 0.0), ("q8_0", 0.5 / 127), ("q4_0", 1.05 / 8)]
)
def test_gguf_holds_the_same_weights(small_model, kind, error):
    from safetensors.torch import load_file

    metadata, tensors = read_gguf(ensure_gguf(small_model, kind))
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.attention.head_count_kv"] == 2
    assert len(metadata["tokenizer.ggml.tokens"]) == 400
    original = load_file(small_model / "model.safetensors")
    assert len(tensors) == len(original)
    down = original["model.layers.1.mlp.down_proj.weight"].float().numpy()
    shape, stored, raw = tensors["blk.1.ffn_down.weight"]
    assert tuple(shape) == down.shape
    most = np.abs(down).max() * (error + 1e-3 * (error > 0))
    assert np.abs(dequantize(stored, raw).reshape(down.shape) - down).max() <= most
    # Rows i and i + 8 of a query head of 16 become neighbours.
    query = original["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    _, stored, raw = tensors["blk.0.attn_q.weight"]
    ours = dequantize(stored, raw).reshape(query.shape)
    np.testing.assert_allclose(ours[16:20], query[[16, 24, 17, 25]], atol=0.02 * (error > 0))
    assert tensors["output_norm.weight"][1] == 0


def test_w8a8_holds_the_same_weights(small_model):
    from safetensors.torch import load_file

    directory = ensure_w8a8(small_model)
    assert json.loads((directory / "config.json").read_text())["quantization_config"]
    original = load_file(small_model / "model.safetensors")
    quantized = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert str(quantized[name].dtype) == "torch.int8"
    restored = quantized[name].float() * quantized[f"{name}_scale"].float()
    step = quantized[f"{name}_scale"].float()
    assert ((restored - original[name].float()).abs() <= step * 0.51 + 0.01 * restored.abs()).all()
    assert quantized["model.norm.weight"].equal(original["model.norm.weight"])


# ---------------------------------------------------------------- rounds


def test_rounds_are_measured_with_new_prompts_each(scripted):
    load = CpuLoad("main", 2, 4, 12, 5)
    server = RunningServer(scripted.url, os.getpid(), 0.1)
    (result,) = measure_load({"quire": server}, load, vocab=1000, rounds=2).values()
    assert [set(each) >= {"foreign_cores", "disturbed"} for each in result["rounds"]] == [True] * 2
    assert result["tokens_per_s"] > 0
    prompts = [tuple(body["prompt"]) for body in scripted.asked if body["max_tokens"] == 5]
    assert len(set(prompts)) == len(prompts) >= 8
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in scripted.asked)


def test_a_round_that_is_not_whole_is_an_error(scripted):
    scripted.fault = "short"
    server = RunningServer(scripted.url, os.getpid(), 0.1)
    with pytest.raises(RuntimeError, match=r"peer, main 2: \d+ of \d+ tokens"):
        measure_load({"peer": server}, CpuLoad("main", 2, 4, 12, 5), vocab=1000, rounds=1)


# ---------------------------------------------------------------- verdicts


def made_result(rate: float) -> dict:
    """Quire at ``rate``, a vLLM alternating with it at 100, and a llama of another part at 50."""

    def side(value: float) -> dict:
        rounds = [{"tokens_per_s": value, "disturbed": False}] * 3
        figures = {"itl_p50_ms": 10.0, "itl_p99_ms": 400.0, "server_cores": 2.0}
        return {"tokens_per_s": value, "rounds": rounds, **figures}

    def part(**sides: float) -> dict:
        load = {
            "floor_tokens_per_s": 200.0,
            "ceilings": vars(ZEN_4),
            "sides": {name.replace("_", " ", 1): side(value) for name, value in sides.items()},
        }
        server = {"ready_s": 5.0, "peak_bytes": 1_700_000_000, "idle_cores": 0.005}
        loads = {each.key: load for each in MAIN}
        return {"loads": loads, "servers": {"quire": server}}

    return {
        "parts": {
            "0.5b-bf16": part(quire=rate, vllm_bf16=100.0),
            "0.5b-int8": part(quire=rate),
            "0.5b-int4": part(quire=rate, llama_q4_0=50.0),
        },
        "start": {"median_s": 2.0},
    }


def test_gates_pass_and_miss_on_the_right_side():
    passes = {each.gate: each for each in evaluate_gates(made_result(120.0))}
    assert passes["0.5b-bf16 main 16"].passes  # 1.2, with a target of 1.05
    assert not passes["0.5b-bf16 main 1"].passes  # 1.2, with a target of 1.25
    assert passes["0.5b-bf16 main 1"].against == "vllm bf16, 100.0 tokens/s, in turn"
    assert not passes["0.5b-bf16 main 16, share of the floor"].passes
    assert not passes["0.5b-bf16 peak memory"].passes  # 1.7 GB, with a limit of 1.6
    assert not passes["0.5b-int8 ITL p99 at 16"].passes  # 400 ms, with a limit of 350
    assert passes["0.5b-int8 ready"].passes
    assert passes["first token after exec"].passes
    assert not any(gate.startswith("100m") for gate in passes)


def test_a_peer_is_taken_from_another_part_before_a_published_figure():
    told = {
        (each.gate, each.against.split(",")[0]): each for each in evaluate_gates(made_result(120.0))
    }
    llama = told["0.5b-int8 main 1", "llama q4_0"]
    assert llama.measured == pytest.approx(2.4)
    assert llama.against.endswith("in part 0.5b-int4")
    scaled = told["0.5b-int8 main 16", "vllm w8a8"]
    assert scaled.measured == pytest.approx(120 / 134)
    assert scaled.against.endswith("scaled 1.00x")


# ---------------------------------------------------------------- the program


def test_pieces_of_a_run_are_merged(tmp_path, monkeypatch, capsys):
    piece = made_result(120.0)["parts"]["0.5b-bf16"]

    def measured(part, *, concurrencies, on_load, **_):
        for key in (f"main {concurrency}" for concurrency in concurrencies):
            on_load(key, piece["loads"][key])
        return piece["servers"]

    monkeypatch.setattr(program, "measure_part", measured)
    out = ["--out", str(tmp_path / "result.json"), "--only", "0.5b-bf16"]
    assert program.main([*out, "--concurrency", "1"]) == 0
    assert program.main([*out, "--concurrency", "16"]) == 0
    told = capsys.readouterr().out
    gates = {each["gate"] for each in json.loads(told.splitlines()[-1])["gates"]}
    assert {"0.5b-bf16 main 1", "0.5b-bf16 main 16"} <= gates
    assert "MISS" in told
    assert set(json.loads((tmp_path / "result.json").read_text())["parts"]) == {"0.5b-bf16"}


def test_a_part_that_fails_keeps_what_was_measured_before(tmp_path, monkeypatch, capsys):
    piece = made_result(120.0)["parts"]["0.5b-int4"]

    def breaks(part, *, on_load, **_):
        on_load("main 1", piece["loads"]["main 1"])
        raise RuntimeError("the server ended with status 1\nno such setting")

    monkeypatch.setattr(program, "measure_part", breaks)
    out = tmp_path / "result.json"
    assert program.main(["--out", str(out), "--only", "0.5b-int4"]) == 1
    told = capsys.readouterr().out
    assert "0.5b-int4 could not be measured: no such setting" in told
    assert "0.5b-int4 main 1 " in told
    assert set(json.loads(out.read_text())["parts"]["0.5b-int4"]["loads"]) == {"main 1"}


@pytest.mark.slow
def test_the_scaling_plot_is_drawn_from_a_real_server(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "0.5b", SMALL)
    result = measure_scaling(
        tmp_path / "models", (), variants=["0.5b-bf16"], sequences=[1, 3], contexts=[16, 64]
    )
    assert [at for at, _ in result["sequences"]["0.5b-bf16"]] == [1, 3]
    assert all(step_ms > 0 for _, step_ms in result["contexts"]["0.5b-bf16"])
    for path in write_charts(result, tmp_path):
        assert path.read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
