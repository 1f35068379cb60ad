"""Triton kernels: each has a twin of the same signature in ``kernels.reference``.

They run on a CUDA device, and anywhere, slowly, under ``TRITON_INTERPRET=1``.
"""
