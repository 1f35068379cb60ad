"""Triton kernels: each has a reference with the same signature in ``kernels.reference``.

They run on a CUDA device and, slowly, anywhere under ``TRITON_INTERPRET=1``.

Triton's type stubs say that device functions never return, because calling one on the host raises.
Code that unpacks their results, or loops over them, is therefore hidden from the type checker.
"""
