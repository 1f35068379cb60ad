"""The interpreter is chosen when a kernel is defined, for a whole process.

The tests under ``interpreted`` are therefore collected only where it has been chosen;
``test_triton_interpreter.py`` starts such a process.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
