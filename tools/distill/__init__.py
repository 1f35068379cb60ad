"""Distillation: train a small model to predict what a large one would generate.

    documents -> packing -+
    generation -----------+-> training (losses, schedule) -> checkpoints -> export, curves
    student --------------+        validation ------------->
                                   acceptance: the value of the result as a draft model

`quire distill` and `python -m tools.distill` are :func:`tools.distill.cli.main`. The method is that
of Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015): the student
matches the teacher's distribution over the next token, softened by a temperature. Losses on hard
labels, hidden states and attention (Jiao et al., "TinyBERT", 2020) may be added, each with its own
weight.
"""
