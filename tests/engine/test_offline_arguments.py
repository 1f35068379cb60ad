"""Wrong arguments of the offline engine: each is told by name, and before anything is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import InvalidParameter
from engine.offline.inputs import as_prompts, check_conversation, params_for

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"device": "tpu"}, "'device' must be one of 'auto', 'cpu', 'cuda', not 'tpu'"),
        ({"quantization": "int3"}, "'quantization' must be one of 'int8', 'int4', .* not 'int3'"),
        ({"max_model_len": "8k"}, "'max_model_len' must be an integer, not '8k'"),
        ({"max_num_seqs": 1.5}, "'max_num_seqs' must be an integer, not 1.5"),
        ({"gpu_memory_utilization": "90%"}, "'gpu_memory_utilization' must be a number, not '90%'"),
        ({"enforce_eager": 1}, "'enforce_eager' must be True or False, not 1"),
    ],
)
def test_an_argument_of_a_wrong_type(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        LLM(**arguments)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_tokens": "5"}, "'max_tokens' must be an integer, not '5'"),
        ({"temperature": "hot"}, "'temperature' must be a number, not 'hot'"),
        ({"top_p": [0.5]}, r"'top_p' must be a number, not \[0.5\]"),
    ],
)
def test_a_sampling_value_of_a_wrong_type(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem) as refused:
        SamplingParams(**fields)
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        (np.array(["one", "two"]), ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ((range(2), "two", np.array([3])), [[0, 1], "two", [3]]),
        ([], []),
    ],
)
def test_prompts_are_texts_or_ids(given: Any, prompts: list[Any]) -> None:
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    "given", [None, 5, b"text", {"prompt": "x"}, [{"prompt": "x"}], [[1.5]], [None], ["x", b"y"]]
)
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(InvalidParameter, match="a prompt is a text or a list of token ids, not "):
        as_prompts(given)


def test_parameters_are_of_their_class() -> None:
    assert params_for(None, 2) == [SamplingParams(), SamplingParams()]
    assert params_for([GREEDY, SamplingParams()], 2) == [GREEDY, SamplingParams()]
    with pytest.raises(InvalidParameter, match="2 prompts but 1 sets"):
        params_for([GREEDY], 2)
    wrong: Any = {"max_tokens": 3}
    for each in (wrong, [wrong]):
        with pytest.raises(InvalidParameter, match=r"parameters are SamplingParams, not \{'max_t"):
            params_for(each, 1)


@pytest.mark.parametrize("given", ["hello", {"role": "user", "content": "hello"}, ["hello"], None])
def test_what_is_no_conversation(given: Any) -> None:
    check_conversation([{"role": "user", "content": "hello"}])
    with pytest.raises(InvalidParameter, match="a conversation is a list of messages such as"):
        check_conversation(given)
