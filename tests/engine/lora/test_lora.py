"""Adapters as PEFT saves them: each row of a mixed batch equals its merged model."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import InvalidParameter
from engine.lora.files import adapter_digest
from engine.paths import default_model_dir
from engine.types import Adapter, Request, SamplingParams
from tests import tiny_models, tiny_vision

peft = pytest.importorskip("peft")

NUM_OUTPUT = 10
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# name -> (family, PEFT's options)
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 16, "target_modules": ALL},
    "attention": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "root": {"r": 8, "lora_alpha": 12, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        **{"r": 4, "lora_alpha": 8, "target_modules": ALL},
        "rank_pattern": {"q_proj": 2, "mlp.up_proj": 6},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 20, "down_proj": 1, "v_proj": 3},
    },
    "mlp": {"r": 3, "lora_alpha": 9, "target_modules": ["gate_proj", "down_proj"]},
}
FAMILIES = ["llama", "qwen3", "cohere", "gpt_neox", "phi3", "gemma2"]
# Tested under one schedule: only their layers differ.
_SLOW = (
    *("gpt_oss", "falcon", "deepseek_v2", "mimo_v2_flash", "gemma4_shared", "deepseek_v3_halves"),
    *("olmo_hybrid", "granitemoehybrid_dense", "jamba", "kimi_linear", "gemma3n", "axk2"),
    *("bailing_hybrid", "longcat_flash"),
)
MORE_FAMILIES = [
    *("gpt2", "falcon_groups", "llama4", "qwen2_moe", "gemma4"),
    *("deepseek_v2_lite", "deepseek_v3"),
    *("qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "mamba2"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in _SLOW),
]
_LATENT = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_LATENT_RANKED = ["q_a_proj", "q_b_proj", *_LATENT[1:]]
_FALCON = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
_OTHER_NAMES = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_oss": ALL[:4],
    "mimo_v2_flash": ALL[:4],
    "gpt_neox": _FALCON,
    "falcon": _FALCON,
    "falcon_groups": _FALCON,
    "deepseek_v2_lite": _LATENT,
    "deepseek_v2": _LATENT_RANKED,
    "deepseek_v3": _LATENT_RANKED,
    "deepseek_v3_halves": _LATENT,
    "longcat_flash": _LATENT_RANKED,
    "axk2": ["q_a_proj", "q_gate_proj", *_LATENT[1:]],
    "qwen3_next": [*ALL[:4], "in_proj_qkvz", "out_proj"],
    "olmo_hybrid": [*ALL, "g_proj"],
    "granitemoehybrid_dense": [*ALL[:4], "in_proj", "out_proj", "input_linear", "output_linear"],
    "falcon_h1": [*ALL, "in_proj"],  # PEFT rejects ``out_proj``
    "mamba2": ["in_proj"],  # here too
    "jamba": [*ALL[:4], "in_proj"],
    "kimi_linear": _LATENT,
    "bailing_hybrid": [*_LATENT, "k_proj", "v_proj", "g_proj"],
    "nemotron_h": [*ALL[:4], "in_proj", "up_proj", "down_proj"],  # here too
    "lfm2": [*ALL[:3], "in_proj", "out_proj", "w1", "w2", "w3"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}


def make_adapter(base, kind, directory, seed, **options):
    """Save a random adapter with PEFT; returns the merged model."""
    if kind in _OTHER_NAMES:
        options["target_modules"] = _OTHER_NAMES[kind]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        adapted.save_pretrained(directory)
        return adapted.merge_and_unload()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    """(base directory, {name: adapter}, prompts, {name or None: greedy continuations})."""
    return make_served(request.param, tmp_path_factory.mktemp("lora"), ADAPTERS)


def make_served(kind, root, options_of, **changes):
    def build():
        return tiny_models.build(kind, **changes)

    base = tiny_models.save(kind, root / "base", **changes)
    rng = random.Random(2)
    shared = [rng.randrange(3, 160) for _ in range(19)]
    prompts = [shared + [rng.randrange(3, 160) for _ in range(n)] for n in (1, 6)]
    prompts += [[rng.randrange(3, 160) for _ in range(n)] for n in (2, 13)]
    adapters, texts = {}, {None: continuations(build(), prompts)}
    for seed, (name, options) in enumerate(options_of.items()):
        path = root / name
        merged = make_adapter(build(), kind, path, seed, **options)
        adapters[name] = Adapter(id=f"{kind}-{name}", name=name, path=str(path))
        texts[name] = continuations(merged, prompts)
    return base, adapters, prompts, texts


def continuations(model, prompts):
    return [tiny_models.greedy_tokens(model, prompt, NUM_OUTPUT) for prompt in prompts]


def engine(base, *, max_loaded=8, **scheduler):
    return EngineCore.load(
        EngineConfig(
            model=str(base),
            dtype="float32",
            device="cpu",
            scheduler=SchedulerConfig(**scheduler),
            cache=CacheConfig(block_size=4, num_blocks=512),
            lora=LoraConfig(max_loaded=max_loaded, max_on_host=max_loaded),
        )
    )


def run(core, requests):
    for request in requests:
        core.add(request)
    tokens = {request.id: [] for request in requests}
    while core.has_work:
        output = core.step()
        assert not output.errors
        for id_, new in zip(output.ids, output.token_ids, strict=True):
            tokens[id_] += new
    return tokens


def requests_of(adapters, prompts, order):
    sampling = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, seed=1)
    return [
        Request(
            id=f"{name}-{i}",
            prompt_token_ids=tuple(prompts[i]),
            sampling=sampling,
            adapter=adapters.get(name),
        )
        for name, i in order
    ]


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"overlap": True},
        {"max_num_seqs": 3},
        {"max_loaded": 1},
    ],
    ids=["at once", "chunks", "overlapped", "few at once", "one slot"],
)
def test_each_row_of_a_mixed_batch_equals_its_merged_model(served, schedule):
    base, adapters, prompts, texts = served
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    tokens = run(engine(base, **schedule), requests_of(adapters, prompts, order))
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)


@pytest.mark.parametrize("kind", MORE_FAMILIES)
def test_layers_of_other_kinds_equal_their_merged_model(kind, tmp_path):
    """Layers with special treatment.

    Latent attention with its absorbed ``kv_b_proj``, fused and transposed projections, the shared
    expert, interleaved rotary positions, and stateful layers.
    """
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two)
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    core = engine(base, max_num_batched_tokens=17)
    tokens = run(core, requests_of(adapters, prompts, order))
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)


@pytest.mark.parametrize("kind", ["qwen2_vl", "mistral3"])
def test_the_text_part_of_a_model_that_sees_is_adapted(kind, tmp_path):
    """Its modules' names have changed since the checkpoints were published; PEFT has the new."""
    tiny_vision.save(kind, tmp_path / "base")
    base = tiny_vision.build(kind)
    is_text = [name for name, _ in base.named_modules() if "language_model.layers" in name]
    names = [name for name in is_text if name.endswith(("q_proj", "v_proj", "down_proj"))]
    options = {"r": 2, "lora_alpha": 8, "target_modules": names}
    merged = make_adapter(base, kind, tmp_path / "a", 0, **options)
    prompt = [[5, 9, 31, 7, 120]]
    expected = continuations(merged, prompt)
    assert expected != continuations(tiny_vision.build(kind), prompt)
    adapters = {"a": Adapter("1", "a", str(tmp_path / "a"))}
    got = run(engine(tmp_path / "base"), requests_of(adapters, prompt, [("a", 0)]))
    assert list(got.values()) == expected


def test_prefixes_of_different_adapters_are_kept_apart(served):
    base, adapters, prompts, texts = served
    core = engine(base)
    for name in (None, "all", None, "all", "root"):
        request = requests_of(adapters, prompts, [(name, 1)])
        assert run(core, request)[f"{name}-1"] == texts[name][1]
    assert core.stats.prefix_cache_hits == 2 * (len(prompts[1]) - 1) // 4 * 4


@pytest.fixture
def adapter(tmp_path):
    """A tiny model's directory with an adapter's beside it, to be damaged."""
    base = tiny_models.save("llama", tmp_path / "base")
    make_adapter(tiny_models.build("llama"), "llama", tmp_path / "a", 0, **ADAPTERS["all"])
    return base, tmp_path / "a"


def _config(**changes):
    def spoil(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def _tensors(change):
    def spoil(path):
        file = path / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return spoil


def _without_first(tensors):
    return dict(list(tensors.items())[1:])


def _renamed(tensors):
    return {name.replace("q_proj", "lm_head"): tensor for name, tensor in tensors.items()}


def _cut(tensors):
    return {name: tensor[:, :-1].contiguous() for name, tensor in tensors.items()}


def _infinite(tensors):
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][1, 2] = torch.inf
    return tensors


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_config(use_dora=True), "use_dora"),
        (_config(bias="all"), "bias"),
        (_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (
            _config(init_lora_weights="pissa"),
            "'pissa', so it changes the base",
        ),
        (_config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
        (_config(init_lora_weights="olora"), "init_lora_weights"),
        (_config(init_lora_weights=["x"]), "init_lora_weights"),
        (_config(kasa_config={"beta": 0.1}), "kasa_config"),
        (_config(alpha_pattern={".*_proj": 2}), "alpha_pattern"),
        (_config(alpha_pattern={"q_proj": "2"}), "no number"),
        (_config(peft_type="IA3"), "peft_type"),
        (_config(lora_alpha="x"), "lora_alpha"),
        (_config(lora_alpha=10**400), "lora_alpha"),
        (_config(alpha_pattern={"q_proj": 10**400}), "no number"),
        (lambda path: (path / "adapter_config.json").write_text("{"), "not JSON"),
        (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model"),
        (lambda path: (path / "adapter_model.safetensors").write_bytes(b"x" * 64), "adapter_model"),
        (_tensors(_without_first), "one of its two matrices"),
        (_tensors(_renamed), "can be adapted"),
        (_tensors(_cut), "matrices of"),
        (_tensors(_infinite), "not finite"),
        (_tensors(lambda tensors: {"x": torch.zeros(2)}), "no part of a LoRA"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(adapter, spoil, why):
    base, path = adapter
    spoil(path)
    core = engine(base)
    request = requests_of({"a": Adapter("1", "a", str(path))}, [[5, 6]], [("a", 0)])
    with pytest.raises(InvalidParameter, match=why) as refusal:
        core.add(*request)
    assert str(path.parent) not in str(refusal.value)
    assert not core.has_work


def test_files_that_have_changed_are_another_adapter(adapter, tmp_path):
    """Read again, they would go on with texts and cached prefixes of the weights before."""
    base, path = adapter
    shutil.copytree(path, tmp_path / "b")
    prompts = [[5, 6] * 8]

    def request_of(number, directory, name):
        registered = Adapter(str(number), name, str(directory), adapter_digest(directory))
        return requests_of({name: registered}, prompts, [(name, 0)])

    core, first = engine(base, max_loaded=1), request_of(1, path, "a")
    others = [request_of(number, tmp_path / "b", f"b{number}") for number in (2, 3)]
    before = run(core, first)
    _tensors(lambda tensors: {name: 2 * each for name, each in tensors.items()})(path)
    assert run(core, first) == before, "it is kept in memory"
    for other in others:  # which take its place, there too
        run(core, other)
    for each in (core, engine(base)):  # and one that replaces a dead engine
        with pytest.raises(InvalidParameter, match="have changed since it was loaded"):
            each.add(*first)
    assert run(core, request_of(4, path, "a")) == run(engine(base), request_of(5, path, "a"))


def test_offline_each_prompt_has_its_adapter(served, tmp_path):
    base, adapters, prompts, texts = served
    sampling = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    options = {"tokenizer": default_model_dir(), "num_gpu_blocks_override": 200}
    with LLM(base, dtype="float32", device="cpu", **options) as llm:
        loras = [None, adapters["all"].path, Path(adapters["mlp"].path), None]
        for lora, names in ((loras, (None, "all", "mlp", None)), (loras[1], ("all",) * 4)):
            results = llm.generate(prompts, sampling, lora=lora, use_tqdm=False)
            got = [list(result.outputs[0].token_ids) for result in results]
            assert got == [texts[name][i] for i, name in enumerate(names)]
        with pytest.raises(InvalidParameter, match="4 prompts but 2 adapters"):
            llm.generate(prompts, sampling, lora=loras[:2])
        with pytest.raises(InvalidParameter, match="no adapter in"):
            llm.generate(prompts, sampling, lora=tmp_path)
        shutil.copytree(adapters["all"].path, tmp_path / "own")
        before = llm.generate(prompts, sampling, lora=tmp_path / "own", use_tqdm=False)
        _config(lora_alpha=160)(tmp_path / "own")
        after = llm.generate(prompts, sampling, lora=tmp_path / "own", use_tqdm=False)
        assert [r.outputs[0].token_ids for r in before] != [r.outputs[0].token_ids for r in after]
