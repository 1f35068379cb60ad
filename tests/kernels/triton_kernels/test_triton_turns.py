"""Kernels launched before their predecessors have ended do not touch these kernels' data early.

``test_triton_aot.py`` examines compiled code; this file checks the source of all kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = sorted((Path(__file__).parents[3] / "kernels" / "triton").glob("*.py"))
# Two read their weights ahead of their turn, four request them, and no more. Attention and adapters
# read their plans, which are complete before the first layer (``plan.py``, ``lora.py``), and
# attention what earlier steps have stored.
_EARLY = {
    "_skinny_kernel": ["weights"],
    "_skinny_packed_kernel": ["places"],
    "_share_kernel": [
        *("unit_starts + num_rows", "part_starts + num_rows"),
        *("part_starts + row", "part_starts + row + 1", "past_lens + row"),
    ],
}
_COMPUTED = {
    *("tl.program_id", "tl.num_programs", "tl.arange", "tl.cdiv", "tl.minimum", "tl.maximum"),
    *("weight_rows", "tl.load", "tl.where"),
}
_EARLY_CALLS = {
    "_share_kernel": {
        "_read_row(row, unit_starts, seq_lens, query_start, lines)",
        *("_row_of_item", "_units_before", "load_tile", "prefetch_tile"),
    },
    "_packed_kernel": {"prefetch"},
    "_shrink_kernel": {"pairs_of_tile", "prefetch"},
    "_expand_kernel": {"pairs_of_tile", "prefetch"},
    "_turned_matmul_kernel": {"prefetch"},
}


def kernels() -> Iterator[ast.FunctionDef]:
    """All kernels that a module launches."""
    for module in MODULES:
        tree = ast.parse(module.read_text())
        defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "launch":
                assert isinstance(call.args[0], ast.Name), ast.unparse(call)
                yield defined[call.args[0].id]


@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda kernel: kernel.name)
def test_a_kernel_awaits_its_turn_first(kernel: ast.FunctionDef) -> None:
    sources = [ast.unparse(statement) for statement in kernel.body]
    assert "wait_for_prior_kernels()" in sources, "in all programs: not within a branch or a loop"
    before = ast.parse("\n".join(sources[: sources.index("wait_for_prior_kernels()")]))
    calls = [node for node in ast.walk(before) if isinstance(node, ast.Call)]
    reads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
    places = sorted(ast.unparse(call.args[0]) for call in reads)
    assert places == sorted(_EARLY.get(kernel.name, []))
    helpers = _EARLY_CALLS.get(kernel.name, set())
    others = {ast.unparse(call.func) for call in calls if ast.unparse(call) not in helpers}
    others = {name for name in others if not name.endswith(".to")}
    assert others - helpers <= _COMPUTED
