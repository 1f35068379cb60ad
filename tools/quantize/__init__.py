"""``quire quantize``: a checkpoint in, one of fewer bits out, a layer at a time.

    [ read a layer ─► watch its inputs ─► fold, clip, round ─► write it ] x layers

What of a layer is rounded says ``sites``; to what, ``grid``; how, ``gptq`` and ``awq``; in which
tensors it is written, ``compressed``. ``run`` ties them together, and goes on where it was stopped.
"""
