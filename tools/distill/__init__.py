"""Distillation: a small model that learns to say what a large one would say.

    documents -> packing -+
    generation -----------+-> training (losses, schedule) -> checkpoints -> export, curves
    student --------------+        validation ------------->
                                   acceptance: what the result is worth as a draft

`quire distill` and `python -m tools.distill` are :func:`tools.distill.cli.main`. The method is
that of Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015): the
student matches the teacher's distribution over the next token, softened by a temperature; hard
labels, hidden states and attention (Jiao et al., "TinyBERT", 2020) may be added, each with a
weight of its own.
"""
