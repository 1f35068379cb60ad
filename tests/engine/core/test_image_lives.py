"""Requests with images through the whole engine: each text is the same as alone."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import InvalidParameter
from engine.images import wait_queue
from engine.images.types import GridScaling, Image, TileScaling
from engine.models.vision.tower import VisionTower
from engine.runner import image_load, load_runner
from engine.types import Request, SamplingParams
from kernels.cpu import linear
from tests import tiny_vision
from tests.image_prompts import ask, rules_of

# A text model with widths that native layers support, so that its steps are captured.
SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2_vl")
    tiny_vision.save("qwen2_vl", directory, text=SHAPE, hidden_size=64)
    return directory


def core(model, *, cache=None, scheduler=None, **changes) -> EngineCore:
    config = EngineConfig(
        model=str(model),
        **{"dtype": "float32", "num_threads": 1, "device": "cpu", **changes},
        cache=CacheConfig(block_size=4, **{"num_blocks": 64, **(cache or {})}),
        scheduler=SchedulerConfig(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 16, **(scheduler or {})}
        ),
    )
    return EngineCore(config, load_runner(config))


def texts(engine, requests, rng=None) -> dict[str, list[int]]:
    """The texts of requests that come at once, or at random."""
    left, told = list(requests), {}
    while left or engine.has_work:
        while left and (rng is None or rng.random() < 0.6):
            engine.add(left.pop(0))
        output = engine.step()
        assert not output.errors, output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told.setdefault(row_id, []).extend(tokens)
    assert engine.stats.blocks.held == 0
    return told


def some_requests(rules, rng, count) -> list[Request]:
    """Requests with few different images, so that some prefixes are shared."""
    made = []
    for number in range(count):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=24, ignore_eos=True
        )
        shapes = rng.choice([((2, 3),), ((1, 2), (2, 1)), ((3, 3),), ()])
        made.append(ask(str(number), rules, rng.randrange(3), sampling, shapes))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_alone(model, seed):
    """Requests come at random, share prefixes, are preempted and computed in chunks."""
    rng = random.Random(seed)
    requests = some_requests(rules_of(model), rng, 12)
    busy = core(model, cache={"num_blocks": 16})
    told = texts(busy, requests, rng)
    assert busy.stats.num_preemptions
    assert busy.stats.prefix_cache_hits
    for request in requests:
        alone = core(model, cache={"enable_prefix_caching": False})
        assert texts(alone, [request]) == {request.id: told[request.id]}


def test_a_text_goes_on_while_an_image_is_read(model, monkeypatch):
    monkeypatch.setattr(wait_queue, "_SLICE_S", 0.0)  # one piece for each of its tokens
    rules, engine = rules_of(model), core(model, scheduler={"max_step_passes": 1})
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.add(Request(id="text", prompt_token_ids=(3, 4, 5), sampling=sampling))
    engine.step()
    asked = ask("image", rules, 0, sampling, ((3, 3),))
    engine.add(asked)
    told = []
    while "image" not in told:
        told += engine.step().ids
    assert told.count("text") >= 8
    monkeypatch.setattr(VisionTower, "embed", lambda *_: pytest.fail("read by a step"))
    texts(engine, [msgspec.structs.replace(asked, id="again", cache_salt="x")])


def test_what_is_read_ahead_is_there_when_it_is_computed(model, monkeypatch):
    """There is room for one image, a prompt has two, and nothing else is admitted meanwhile."""
    monkeypatch.setattr(image_load, "_MIN_CACHED_CELLS", 1)
    requests = [ask(str(n), rules_of(model), n, shapes=((3, 3), (2, 3))) for n in range(4)]
    expected = texts(core(model), requests)
    given = {"max_image_tokens": 9, "max_videos": 0, "scheduler": {"max_num_seqs": 1}}
    engine = core(model, cache={"enable_prefix_caching": False}, **given)
    monkeypatch.setattr(VisionTower, "embed", lambda *_: pytest.fail("read by a step"))
    told = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(200):
        output = engine.step()
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told[row_id] += tokens
    assert told == expected
    assert engine._runner.image_prefetcher.capacity == 9
    assert len(engine._runner.image_prefetcher._cache) == 1


def test_images_are_read_on_when_what_they_waited_for_ends_with_its_first_token(model, monkeypatch):
    """Its images' tokens and its last token are computed by one step, after which nothing runs."""
    monkeypatch.setattr(image_load, "_MIN_CACHED_CELLS", 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    given = {"max_image_tokens": 9, "max_videos": 0}
    engine = core(model, cache={"enable_prefix_caching": False}, **given)
    for number in range(3):  # there is room for the image of one
        engine.add(ask(str(number), rules_of(model), number, sampling, ((3, 3),)))
    ended = []
    while engine.has_work:
        assert not engine.idle_s, "nobody would step it"
        ended += engine.step().ids
    assert ended == ["0", "1", "2"]


def test_an_image_whose_embeddings_are_not_finite_fails_alone(model):
    rules, engine = rules_of(model), core(model)
    text = Request(id="text", prompt_token_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=9))
    alone = texts(core(model), [text])
    engine.add(text)
    tower = engine._runner._media._encoders[Image]._tower
    bias = tower._merger._down.bias
    assert bias is not None
    bias[3] = float("nan")
    engine.add(ask("image", rules))
    told, errors = [], {}
    while engine.has_work:
        output = engine.step()
        errors |= output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told += tokens if row_id == "text" else ()
    assert {"text": told} == alone
    assert errors["image"].message == "an image could not be read: its embeddings are not finite"
    bias[3] = 0.0
    assert texts(engine, [ask("later", rules)])["later"]


def test_a_prefix_with_the_same_image_is_found_and_no_other(model):
    rules = rules_of(model)
    engine = core(model)
    texts(engine, [ask("a", rules, 0)])
    prompt = len(ask("a", rules, 0).prompt_token_ids)
    texts(engine, [ask("b", rules, 1)])
    assert engine.stats.prefix_cache_hits == 0  # the first block contains an image
    texts(engine, [ask("c", rules, 0)])
    assert engine.stats.prefix_cache_hits == (prompt - 1) // 4 * 4


@pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")
def test_recorded_steps_turn_as_others_do(model):
    rules, rng = rules_of(model), random.Random(7)
    requests = some_requests(rules, rng, 6)
    found = []
    for eager in (False, True):
        engine = core(model, dtype="bfloat16", enforce_eager=eager)
        found.append(texts(engine, requests))
        if not eager:
            assert engine._runner._graphs._programs
    assert found[0] == found[1]


def test_images_are_refused_where_they_are_not_taken(model):
    engine = core(model, max_images=0)
    assert engine.info.images is None
    with pytest.raises(InvalidParameter, match="images are not taken"):
        engine.add(ask("a", rules_of(model)))
    text = Request(id="b", prompt_token_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=2))
    assert texts(engine, [text])["b"]


def test_an_encoder_that_is_quantised_leaves_the_text(tmp_path, caplog):
    caplog.set_level("INFO")
    tiny_vision.save("qwen2_vl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["visual.blocks.0.attn.proj.weight"]
    tensors["visual.blocks.0.attn.proj.qweight"] = torch.zeros((32, 4), dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    engine = core(tmp_path)
    assert "images are not taken: its encoder is quantised ('visual.blocks.0.a" in caplog.text
    assert engine.info.images is None
    text = Request(id="a", prompt_token_ids=(3, 4, 5), sampling=SamplingParams(max_tokens=2))
    assert texts(engine, [text])["a"]


def test_images_of_one_size_are_taken_whole_or_not_at_all(tmp_path, caplog):
    caplog.set_level("INFO")
    tiny_vision.save("llava_clip", tmp_path)
    assert core(tmp_path, max_image_tokens=4).info.images == rules_of(tmp_path)
    assert core(tmp_path, max_image_tokens=3).info.images is None
    assert "they have 4 tokens each, more than --max-image-tokens" in caplog.text


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        (
            "idefics3",  # up to 4 by 4 tiles of 4 tokens, and the whole image
            {68: TileScaling(28, 112), 67: TileScaling(28, 84), 4: TileScaling(28, 28)},
        ),
        (
            "internvl",  # up to 12 tiles of 4 tokens, and the whole image
            {52: GridScaling(28, 1, 12), 51: GridScaling(28, 1, 11), 11: GridScaling(28, 1, 1)},
        ),
    ],
)
def test_images_in_tiles_have_fewer_but_whole_ones(tmp_path, caplog, kind, limits):
    caplog.set_level("INFO")
    tiny_vision.save(kind, tmp_path)
    for most, scaling in limits.items():
        found = core(tmp_path, max_image_tokens=most).info.images
        assert found.scaling == scaling
        assert found.scaling.max_tiles * 4 <= most
    assert core(tmp_path, max_image_tokens=3).info.images is None
    assert "a tile of them has 4 tokens, more than --max-image-tokens" in caplog.text


def test_a_fork_with_another_image_is_none(model):
    rules = rules_of(model)
    leader, other = ask("a", rules, 0), ask("b", rules, 1)
    fork = msgspec.structs.replace(other, fork_of="a")
    told = texts(core(model), [leader, fork])
    assert told["b"] == texts(core(model), [other])["b"]
