"""Kernels are interpreted here, which is chosen for a whole process.

The tests under ``dry`` are therefore collected only where it has been chosen;
``test_pretended_gpu.py`` starts such a process.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["dry/*"]
