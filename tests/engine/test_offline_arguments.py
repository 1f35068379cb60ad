"""Wrong arguments of the offline engine: each is told by name, and before anything is loaded."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from pydantic.fields import FieldInfo

from engine import LLM, BeamParams, SamplingParams
from engine.errors import InvalidParameter
from engine.offline.adapters import OfflineAdapters
from engine.offline.inputs import as_beams, as_prompts, check_conversation, params_for
from server.settings import Settings

GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"device": "tpu"}, "'device' must be one of 'auto', 'cpu', 'cuda', not 'tpu'"),
        ({"quantization": "int3"}, "'quantization' must be one of 'int8', 'int4', .* not 'int3'"),
        ({"max_model_len": "8k"}, "'max_model_len' must be an integer of at least 1, not '8k'"),
        ({"max_num_seqs": 1.5}, "'max_num_seqs' must be an integer of at least 1, not 1.5"),
        ({"gpu_memory_utilization": "90%"}, "must be a number above 0 and at most 1, not '90%'"),
        ({"enforce_eager": 1}, "'enforce_eager' must be True or False, not 1"),
    ],
)
def test_an_argument_of_a_wrong_type(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        LLM(**arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_num_seqs": 0}, "'max_num_seqs' must be an integer of at least 1, not 0"),
        ({"kv_offload_bytes": -5}, "'kv_offload_bytes' must be an integer of at least 0, not -5"),
        ({"gpu_memory_utilization": 1.5}, "must be a number above 0 and at most 1, not 1.5"),
        ({"gpu_memory_utilization": math.nan}, "above 0 and at most 1, not nan"),
        ({"tensor_parallel_size": 65}, "an integer of at least 1 and at most 64, not 65"),
    ],
)
def test_an_argument_out_of_range(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem) as refused:
        LLM(**arguments)
    assert refused.value.param == next(iter(arguments))


def test_the_limits_are_those_of_the_server() -> None:
    shared = {"max_num_seqs", "gpu_memory_utilization", "video_fps", "num_draft_tokens"}
    for name, hint in get_type_hints(LLM.__init__, include_extras=True).items():
        if name not in Settings.model_fields:
            continue
        found = _limits(hint)
        assert found == _limits(Settings.model_fields[name]), name
        shared -= {name} if found else set()
    assert not shared  # the comparison saw limits


def _limits(hint: Any) -> dict[str, float]:
    """The limits anywhere in a type that is annotated with those of msgspec or of pydantic."""
    values = {name: getattr(hint, name, None) for name in ("ge", "gt", "le", "lt")}
    found: dict[str, float] = {name: value for name, value in values.items() if value is not None}
    if isinstance(hint, FieldInfo):
        found |= _limits(hint.annotation)
    for inner in (*get_args(hint), *getattr(hint, "metadata", ())):
        found |= _limits(inner)
    return found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_tokens": "5"}, "'max_tokens' must be an integer, not '5'"),
        ({"temperature": "hot"}, "'temperature' must be a number, not 'hot'"),
        ({"top_p": [0.5]}, r"'top_p' must be a number, not \[0.5\]"),
        ({"max_tokens": 5.5}, "'max_tokens' must be an integer, not 5.5"),
        ({"top_k": 5.5}, "'top_k' must be an integer, not 5.5"),
        ({"n": 2.0}, "'n' must be an integer, not 2.0"),
        ({"logprobs": True}, "'logprobs' must be an integer, not True"),
        ({"ignore_eos": "no"}, "'ignore_eos' must be True or False, not 'no'"),
        ({"stop": [5]}, r"'stop' must be a list of strings, not \[5\]"),
        ({"stop_token_ids": 5}, "'stop_token_ids' must be a list of integers, not 5"),
        ({"bad_token_ids": [5]}, r"must be a list of lists of integers, not \[5\]"),
        ({"logit_bias": {"5": 1.0}}, "must be a dict of integers to numbers, not {'5': 1.0}"),
        ({"grammar": "[a-z]"}, r"'grammar' must be of the type Grammar, not '\[a-z\]'"),
        ({"allowed_token_ids": []}, "'allowed_token_ids' must not be empty"),
    ],
)
def test_a_sampling_value_of_a_wrong_type(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem) as refused:
        SamplingParams(**fields)
    assert refused.value.param == next(iter(fields))


def test_lists_and_numbers_of_numpy_become_those_of_python() -> None:
    given: dict[str, Any] = {"seed": np.int64(3), "temperature": np.float32(0.5)}
    listed: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": np.array([1, 2])}
    params = SamplingParams(**given, **listed, logit_bias={np.int64(5): 1})
    assert (type(params.seed), params.seed, params.temperature) == (int, 3, 0.5)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert params.logit_bias == {5: 1.0}


def test_beams_of_a_wrong_type() -> None:
    fields: dict[str, Any]
    for fields, problem in (
        ({"width": 2.5}, "'width' must be an integer, not 2.5"),
        ({"early_stopping": "soon"}, "must be True or False or 'never', not 'soon'"),
    ):
        with pytest.raises(InvalidParameter, match=problem):
            BeamParams(**fields)
    wrong: Any = {"width": 2}
    with pytest.raises(InvalidParameter, match=r"beams are BeamParams, not \{'width': 2\}"):
        as_beams(wrong)


def test_an_adapter_is_a_path() -> None:
    wrong: Any
    for wrong in (5, [5]):
        with pytest.raises(InvalidParameter, match="the path of a directory, not 5"):
            OfflineAdapters().each(wrong, 1)


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
