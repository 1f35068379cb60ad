"""The offline LLM on the embedded model, end to end; no test depends on the model's knowledge."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.driver import Driver
from engine.errors import (
    ContextLengthExceeded,
    EngineAsleep,
    EngineDead,
    Failure,
    InvalidParameter,
    ModelLoadError,
    ProfileRefused,
    RequestError,
    RequestFailed,
    SleepRefused,
    TemplateError,
)
from engine.offline.text import ChatOptions
from engine.types import EngineOutput
from tests.engine.traces import are_whole, steps

PROMPTS = ["The capital of", "Hello", "List three colours:", "👍🏽"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    traces = tmp_path_factory.mktemp("traces")
    with LLM(
        num_threads=1, max_model_len=512, num_gpu_blocks_override=256, profile=traces
    ) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def all_blocks_come_back(llm: LLM) -> Iterator[None]:
    yield
    engine = llm.stats().engine
    assert (engine.num_running, engine.num_waiting, engine.blocks.held) == (0, 0, 0)


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=9)
    params = [GREEDY, seeded, GREEDY, seeded]
    together = llm.generate(PROMPTS, params)
    for prompt, each, result in zip(PROMPTS, params, together, strict=True):
        (alone,) = llm.generate(prompt, each)
        assert result.outputs == alone.outputs
        assert (result.prompt, result.prompt_token_ids) == (prompt, tuple(llm.encode(prompt)))
        (completion,) = result.outputs
        assert completion.text == llm.decode(completion.token_ids)
        streamed = list(llm.stream(prompt, each))
        assert "".join(delta.text for delta in streamed) == completion.text
        assert [delta.finished for delta in streamed] == [*[False] * (len(streamed) - 1), True]
    ids = llm.encode(PROMPTS[0])
    assert llm.generate(ids, GREEDY)[0].outputs == together[0].outputs
    assert llm.generate([ids, PROMPTS[0]], GREEDY)[1].outputs == together[0].outputs
    assert llm.generate([]) == []


def test_a_profile_holds_the_steps_of_what_was_generated(llm: LLM, tmp_path: Path) -> None:
    expected = llm.generate(PROMPTS, GREEDY)
    llm.start_profile(200)
    assert [result.outputs for result in llm.generate(PROMPTS, GREEDY)] == [
        result.outputs for result in expected
    ]
    trace = llm.stop_profile()
    found = steps(trace.path)
    assert are_whole(found)
    assert len(found) == trace.num_steps
    assert sum(parts.count("forward") for parts in found) >= GREEDY.max_tokens
    with pytest.raises(ProfileRefused):
        llm.stop_profile()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        LLM(profile=tmp_path / "file")


@pytest.mark.usefixtures("only_new_objects_collected")
def test_it_sleeps_between_batches(llm: LLM, tmp_path: Path) -> None:
    before = llm.generate(PROMPTS, GREEDY)
    with llm.stream("Once upon a time", GREEDY) as stream:
        next(stream)
        with pytest.raises(SleepRefused):
            llm.sleep()
    for rest in (llm.sleep, lambda: llm.sleep(2)):
        rest()
        with pytest.raises(EngineAsleep):
            llm.generate("Hello", GREEDY)
        llm.wake_up()
        again = llm.generate(PROMPTS, GREEDY)
        assert [result.outputs for result in again] == [result.outputs for result in before]
    with pytest.raises(InvalidParameter, match="level"):
        llm.sleep(3)
    llm.reload_weights()
    assert llm.model_info().generation == 1
    with pytest.raises(ModelLoadError):
        llm.reload_weights(tmp_path)
    after = llm.generate(PROMPTS, GREEDY)
    assert [result.outputs for result in after] == [result.outputs for result in before]


def test_several_choices_differ_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=10, ignore_eos=True)
    first, again = (llm.generate("Once upon a time", params)[0] for _ in range(2))
    assert first.outputs == again.outputs
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({choice.token_ids for choice in first.outputs}) == 3


def test_a_prompt_seen_before_comes_from_the_cache(llm: LLM) -> None:
    prompt = "A sentence that is long enough to fill several blocks of the cache. " * 4
    first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens < 16
    assert again.num_cached_tokens >= len(again.prompt_token_ids) // 16 * 16 - 16
    assert again.outputs == first.outputs


def test_logprobs_are_told_for_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    (result,) = llm.generate("The cat sat", params)
    (completion,) = result.outputs
    assert completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids
    for entry in completion.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token_id  # greedy
        assert entry.top[0].logprob == entry.logprob
    assert result.prompt_logprobs is not None
    assert tuple(entry.token_id for entry in result.prompt_logprobs) == result.prompt_token_ids
    assert result.prompt_logprobs[0].logprob is None
    assert all(len(entry.top) == 2 for entry in result.prompt_logprobs[1:])
    assert llm.generate("The cat sat", GREEDY)[0].outputs[0].logprobs is None


def test_a_stop_string_ends_the_text_and_frees_the_request(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    before = text[: text.index(stop)]
    steps = llm.stats().engine.num_steps
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=400,
            ignore_eos=True,
            stop=stop if include else (stop,),  # a single one may stand for itself
            include_stop_str_in_output=include,
        )
        (completion,) = llm.generate("Hello", params)[0].outputs
        assert completion.text == before + stop * include
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert "".join(delta.text for delta in llm.stream("Hello", params)) == completion.text
    assert llm.stats().engine.num_steps - steps < 100  # the engine did not continue


def test_streams_run_side_by_side_and_can_be_left(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS[:2]]
    abandoned = llm.stream("Once", long)
    next(abandoned)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    for first, second in zip(*streams, strict=False):
        texts[0] += first.text
        texts[1] += second.text
    texts[1] += "".join(delta.text for delta in streams[1])
    assert texts == expected
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == expected[0]
    with abandoned:
        assert llm.stats().engine.num_running == 1
    assert list(abandoned) == []


def test_a_refusal_comes_before_anything_starts(llm: LLM) -> None:
    steps = llm.stats().engine.num_steps
    for bad, params, kind in (
        ("", GREEDY, InvalidParameter),
        ([10**6], GREEDY, InvalidParameter),
        ("a\ud800", GREEDY, InvalidParameter),
        ("word " * 2000, GREEDY, ContextLengthExceeded),
        ("x", [GREEDY], InvalidParameter),
        ("x", SamplingParams(stop_token_ids=(10**6,)), InvalidParameter),
    ):
        with pytest.raises(kind):
            llm.generate(["fine", bad], params)
    with pytest.raises(InvalidParameter):
        llm.stream("x", SamplingParams(n=2))
    assert llm.stats().engine.num_steps - steps < 12  # processing of what was aborted
    assert llm.generate("fine", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_request_that_fails_leaves_the_others_whole(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPTS[:2], GREEDY)
    real_step = Driver.step
    victims: list[str] = []

    def failing_step(driver: Driver) -> list:
        """What the engine does if one request's logits are not finite."""
        if not victims:
            victims.append(next(iter(driver._live)))
            driver.core.abort(victims[0])
            core_step = driver.core.step

            def step() -> EngineOutput:
                monkeypatch.setattr(driver.core, "step", core_step)
                out = core_step()
                at = out.ids.index(victims[0])
                reasons = (*out.finish_reasons[:at], "error", *out.finish_reasons[at + 1 :])
                failure = Failure(kind="RequestFailed", message="not finite")
                return EngineOutput(
                    ids=out.ids,
                    token_ids=out.token_ids,
                    finish_reasons=reasons,
                    num_cached_tokens=out.num_cached_tokens,
                    errors={victims[0]: failure},
                    stats=out.stats,
                )

            monkeypatch.setattr(driver.core, "step", step)
        return real_step(driver)

    monkeypatch.setattr(Driver, "step", failing_step)
    failed, whole = llm.generate(PROMPTS[:2], GREEDY)
    assert (failed.outputs[0].finish_reason, failed.outputs[0].error) == ("error", "not finite")
    assert whole.outputs == expected[1].outputs
    victims.clear()
    with pytest.raises(RequestFailed, match="not finite"):
        list(llm.stream(PROMPTS[0], GREEDY))


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say <|im_end|> twice"}]
    one, other = llm.chat([messages, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert one.prompt_token_ids == tuple(llm.encode_chat(messages))
    assert one.prompt.count("<|im_end|>") == 2  # the user's text and the template's own
    (eos,) = llm.encode("<|im_end|>", parse_special=True)
    assert one.prompt_token_ids.count(eos) == 1
    assert llm.chat([{"role": "user", "content": "Hi"}], GREEDY)[0].outputs == other.outputs
    streamed = llm.stream_chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert "".join(delta.text for delta in streamed) == other.outputs[0].text
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    assert "get_weather" in llm.decode(llm.encode_chat(messages, tools=tools))
    with pytest.raises(TemplateError):
        llm.chat([{"role": "nobody", "content": "Hi"}], GREEDY)


def test_a_streamed_chat_has_the_options_of_a_chat(llm: LLM) -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Say"}]
    options: ChatOptions = {"add_generation_prompt": False, "continue_final_message": True}
    (whole,) = llm.chat(begun, GREEDY, **options)
    streamed = llm.stream_chat(begun, GREEDY, **options)
    assert "".join(delta.text for delta in streamed) == whole.outputs[0].text


def test_info_and_stats_tell_of_memory(llm: LLM) -> None:
    info, stats = llm.model_info(), llm.stats()
    assert info.max_model_len == 512
    assert stats.memory == info.memory
    assert stats.memory.weights_bytes >= info.num_parameters
    assert stats.engine.blocks.total == 256
    assert 0 < stats.device.used_bytes <= stats.device.total_bytes


def test_progress_is_shown_at_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "tokens/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_closed_llm_says_so(tmp_path) -> None:
    small = LLM(num_threads=1, max_model_len=64, num_gpu_blocks_override=8)
    stream = small.stream("Hello", GREEDY)
    small.close()
    small.close()
    with pytest.raises(EngineDead):
        list(stream)
    with pytest.raises(EngineDead):
        small.generate("Hello", GREEDY)
    with pytest.raises(ModelLoadError):
        LLM(tmp_path)
    with pytest.raises(RequestError):
        SamplingParams(temperature=-1.0)
