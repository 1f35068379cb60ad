"""``quire quantize``: quantises a checkpoint to fewer bits, one layer at a time.

    [ read a layer ─► observe its inputs ─► fold, clip, round ─► write it ] x layers

``sites`` defines which weights of a layer are rounded, ``grid`` the levels they are rounded to,
``gptq`` and ``awq`` how, and ``compressed`` the tensors they are written as. ``run`` ties them
together and resumes an interrupted run.
"""
