"""Continue several prompts as one batch."""

import sys

from engine import LLM, SamplingParams

prompts = ["The capital of France is", "Monday, Tuesday,", "The opposite of hot is"]
params = SamplingParams(temperature=0.0, max_tokens=12, stop=(".",))

with LLM(*sys.argv[1:]) as llm:
    for result in llm.generate(prompts, params):
        (completion,) = result.outputs
        print(f"{result.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
