"""Generate several answers to one prompt. With a seed they are the same in every run and batch."""

import sys

from engine import LLM, SamplingParams

prompt = "Once upon a time there was"
params = SamplingParams(n=3, temperature=1.0, top_p=0.95, seed=42, max_tokens=16)

with LLM(*sys.argv[1:]) as llm:
    (first,) = llm.generate(prompt, params)
    for completion in first.outputs:
        print(f"{completion.index}: {completion.text!r}")

    # Next to other prompts, each with its own parameters, the choices are the same.
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    _, again = llm.generate(["The opposite of hot is", prompt], [greedy, params])
    print("the same again:", again.outputs == first.outputs)
