"""Triton kernels: each has a twin of the same signature in ``kernels.reference``.

They run on a CUDA device, and anywhere, slowly, under ``TRITON_INTERPRET=1``.

Triton's own types say that calling a device function never returns, as it raises on the host. What
takes results of one apart, or loops over them, is therefore kept from the type checker.
"""
