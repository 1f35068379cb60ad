"""Log-probabilities of an answer and of its prompt."""

import math
import sys

from engine import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=1)

with LLM(*sys.argv[1:]) as llm:
    (result,) = llm.generate("The capital of France is", params)

    print("The prompt, and what the model would have said instead:")
    for entry in result.prompt_logprobs or ():
        if entry.logprob is not None:  # the first token has no predecessor
            print(f"  {entry.token!r:12} rank {entry.rank:4}, likeliest {entry.top[0].token!r}")

    print("The answer, and the likeliest tokens at each place:")
    for entry in result.outputs[0].logprobs or ():
        others = ", ".join(f"{top.token!r} {math.exp(top.logprob):.0%}" for top in entry.top)
        print(f"  {entry.token!r:12} {others}")
