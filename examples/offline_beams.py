"""Beam search: the most likely complete texts, with their scores."""

import sys

from engine import LLM, BeamParams, SamplingParams

with LLM(*sys.argv[1:]) as llm:
    beams = BeamParams(width=4, length_penalty=1.0)
    params = SamplingParams(max_tokens=12)
    for result in llm.beam_search(["The capital of France is"], beams, params):
        for completion in result.outputs:
            print(f"{completion.score:8.3f}  {completion.text!r}")
