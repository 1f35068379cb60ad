"""End a text at the right place, and keep it from repeating itself."""

import sys

from engine import LLM, SamplingParams

with LLM(*sys.argv[1:]) as llm:
    # The text ends before a stop string, wherever token boundaries fall.
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=(".", "\n\n"))
    (result,) = llm.generate("The sun is", params)
    completion = result.outputs[0]
    print(f"{completion.text!r}, ended by {completion.stop_reason!r}")

    # Penalties make tokens that have occurred less likely to be repeated.
    for penalty in (0.0, 1.5):
        params = SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True, frequency_penalty=penalty
        )
        (result,) = llm.generate("The capital of France is", params)
        print(f"frequency penalty {penalty}: {result.outputs[0].text!r}")

    # A bias forbids a token (-100), or forces it (100).
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    paris = llm.encode(" Paris")[-1]
    params = SamplingParams(temperature=0.0, max_tokens=24, logit_bias={paris: -100.0})
    (result,) = llm.chat(messages, params)
    print(f"without that word: {result.outputs[0].text!r}")
