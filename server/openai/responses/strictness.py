"""Which tools' schemas cannot be enforced, where a request leaves open whether they are."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidParameter
from server.errors import ApiError
from server.openai.responses.tools import OfferedTool
from server.state import Model, ServerState
from server.text.answer_grammar import AnswerRules
from server.text.enforceable import UnenforceableSchema
from server.text.tool_grammar import CallableTool


async def find_unenforceable(
    state: ServerState, model: Model, tools: Sequence[OfferedTool]
) -> frozenset[str]:
    """The names of the tools with schemas that cannot be enforced; of all if no single one is.

    Args:
        state: the application's, whose grammar checker remembers its verdicts.
        model: the one whose format of calls counts.
        tools: functions; together they were refused.
    """
    names = [tool.name for tool in tools]
    found = [tool.name for tool in tools if not await _is_enforceable(state, model, tool)]
    return frozenset(found or names)


async def _is_enforceable(state: ServerState, model: Model, tool: OfferedTool) -> bool:
    answers = model.answer_format
    if answers.dialect is None:  # which is the fault
        return True
    parameters = tool.for_chat(())["function"].get("parameters", {})
    rules = AnswerRules(
        dialect=answers.dialect,
        tools=[CallableTool(tool.name, parameters, is_strict=True)],
        is_required=True,
        channels=None if answers.reasoning is None else answers.reasoning.channels,
        special_ids=answers.special_ids,
    )
    try:
        grammar = rules.grammar()
        if grammar is not None:
            await state.grammars.check(grammar, param="tools")
    except (UnenforceableSchema, InvalidParameter, ApiError):
        return False
    return True
