"""The offline LLM gives Hugging Face's answers to conversations with images."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from tests.tiny_vision import IMAGE
from tests.tiny_vision_twin import Twin

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
OPTIONS: dict[str, Any] = {"num_threads": 1, "use_tqdm": False, "dtype": "float32"}
KINDS = (
    *("qwen2_5_vl", "qwen3_vl", "mistral3", "llava_clip", "gemma3", "gemma4", "gemma4_unified"),
    *("idefics3", "smolvlm", "internvl", "glm4v", "kimi_k25", "aya_vision", "cohere2_vision"),
    *("lfm2_vl", "llama4", "llava_next", "llava_onevision", "minicpmv4_6"),
)


def photo(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture
def llm(twin: Twin) -> Iterator[LLM]:
    with LLM(twin.directory, **OPTIONS) as loaded:
        yield loaded


def conversation(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": shown}]


PLACE = {"type": "image"}


def test_what_is_said_of_images_is_what_hugging_face_says(
    twin: Twin, llm: LLM, tmp_path: Path
) -> None:
    images = [photo(1), photo(2, 31, 120)]
    files = [tmp_path / "one.png", tmp_path / "two.webp"]
    images[0].save(files[0])
    images[1].save(files[1], lossless=True)
    url = "data:image/png;base64," + base64.b64encode(files[0].read_bytes()).decode()
    wanted = twin.answer(conversation("What?", PLACE, " or ", PLACE), images, 10)
    spellings: list[tuple[Any, Any]] = [
        ({"type": "image", "image": images[0]}, {"type": "image", "image": images[1]}),
        ({"type": "image", "image": files[0]}, {"type": "image", "image": str(files[1])}),
        (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": files[1].read_bytes()},
        ),
    ]
    asked = [conversation("What?", one, " or ", two) for one, two in spellings]
    for result in llm.chat(asked, GREEDY):
        assert list(result.outputs[0].token_ids) == wanted
        assert list(result.prompt_token_ids) == llm.encode_chat(asked[0])
    streamed = "".join(delta.text for delta in llm.stream_chat(asked[0], GREEDY))
    assert streamed == llm.decode(wanted)
    other = llm.chat(conversation("What?", spellings[0][1], " or ", spellings[0][0]), GREEDY)
    assert list(other[0].outputs[0].token_ids) != wanted


def test_prompts_are_those_of_hugging_faces_processors(twin: Twin, llm: LLM) -> None:
    """With images at the start, adjacent, after newlines, and spelled out in a text."""
    image = photo(4)
    shown = {"type": "image", "image": image}
    for parts in ((shown, "a"), ("b\n", shown, shown), ("c", shown, "\n\nd", shown)):
        places = [PLACE if part is shown else part for part in parts]
        wanted = twin.prompt(conversation(*places), [image] * places.count(PLACE))
        assert llm.encode_chat(conversation(*parts)) == wanted
    spelled = "<start_of_image><image_soft_token><|image_pad|><image><IMG_CONTEXT>"
    if twin.family == "aya":  # its placeholder is plain text
        with pytest.raises(InvalidParameter, match="shows 2 images of 1"):
            llm.encode_chat(conversation(spelled, shown))
        return
    ids = llm.encode_chat(conversation(spelled, shown))
    assert spelled in llm.decode(ids, skip_special_tokens=False)
    assert ids.count(IMAGE) == twin.prompt(conversation(PLACE), [image]).count(IMAGE)


def test_choices_about_an_image_are_those_of_their_seeds(twin: Twin, llm: LLM) -> None:
    asked = conversation({"type": "image", "image": photo(3)}, "Tell")
    sampling = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    (together,) = llm.chat(asked, sampling)
    texts = [choice.token_ids for choice in together.outputs]
    assert len(set(texts)) == 3
    alone = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    assert llm.chat(asked, alone)[0].outputs[0].token_ids == texts[0]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    model = Twin("qwen2_5_vl", tmp_path / "model").directory
    with LLM(model, max_images=1, **OPTIONS) as llm:
        one = {"type": "image", "image": photo(1)}
        for parts, words in (
            ([one, one], "2 images; at most 1"),
            ([{"type": "image", "image": b"no"}], "neither PNG"),
            ([{"type": "image", "image": "http://x/"}], "nothing is fetched"),
            ([{"type": "image", "image": 5}], "cannot be a int"),
        ):
            with pytest.raises(InvalidParameter, match=words):
                llm.chat(conversation(*parts), GREEDY)
        with pytest.raises(OSError, match=r"no\.png"):
            llm.chat(conversation({"type": "image", "image": "no.png"}), GREEDY)
    with (
        LLM(model, max_images=0, **OPTIONS) as llm,
        pytest.raises(InvalidParameter, match="takes no images here"),
    ):
        llm.chat(conversation(one), GREEDY)
