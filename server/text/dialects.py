"""How families of models write tool calls, as data, and which of them a chat template shows.

harmony       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
llama3        {"name": "f", "parameters": {...}}       also after <|python_tag|>
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]
mistral_args  [TOOL_CALLS]f[ARGS]{...}
pythonic      [f(a=1), g()]
deepseek_v3   section( call("function" sep f "\\n```json\\n" {...} "\\n```") )
deepseek_v31  section( call(f sep {...}) )
deepseek_v32  section( <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1... )
granite       <|tool_call|>[{"name": "f", "arguments": {...}}]
glm45         <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
longcat_pairs the same, with tags that begin with longcat_
longcat       <longcat_tool_call>\n{"name": "f", "arguments": {...}}\n</longcat_tool_call>
kimi_k2       section( call(functions.f:0 argument {...}) )
qwen3_xml     <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
seed_oss      the same, between <seed:tool_call> and </seed:tool_call>
minimax_m2    <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>...
nemotron      <TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>
hunyuan_a13b  <tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>
lfm2          <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>
gemma4        <|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>
functiongemma <start_function_call>call:f{a:<escape>x<escape>,b:1}<end_function_call>
olmo3         <function_calls>\nf(a=1)\ng()\n</function_calls>
cohere        <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]...
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from server.text import dsml_calls, harmony, json_calls, named_calls, python_calls, xml_calls
from server.text.brace_calls import BracedCalls
from server.text.calls import ToolCallEmitter
from server.text.named_calls import NamedCalls
from server.text.source import Read, Source

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_ACTION_BEGIN, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
_COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_GEMMA_QUOTE = '<|"|>'


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The format of one model family's tool calls.

    The output is ``prefix``, then for each call its head (with the name in place of ``{}``), the
    arguments and its tail, with ``separator`` between calls, then ``suffix``.
    """

    name: str
    template_markers: tuple[str, ...]  # texts that are all in this family's chat templates
    alternative_marker: str = ""  # an alternative to those in some templates; "": none
    excluded_marker: str = ""  # a text in none of this family's templates; "": none
    opener: str  # the text that announces calls; "" if there is none
    closers: tuple[str, ...] = ()  # may be left over after calls
    bare_start: str = ""  # the first characters of an answer made of calls only
    read: Callable[[Source, ToolCallEmitter], Read[None]]  # reads what follows the opener
    prefix: str = ""
    call_prefix: str = ""
    call_suffix: str = ""
    separator: str = ""
    suffix: str = ""
    # The format of arguments.
    arguments: Literal[
        "json", "python", "xml", "invoke", "dsml", "pairs", "longcat_pairs", "braces"
    ] = "json"
    quote: str = ""  # before and after strings in braces
    token: str = ""  # a part of all tags, where that is a special token; "": the markers are
    is_numbered: bool = False  # the ":0" in the head is the call's number
    is_single: bool = False  # at most one call per answer
    id_length: int = 24
    id_prefix: str = "call_"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are neither content nor a call's name or arguments."""
        return tuple(text for text in (self.opener, *self.closers) if text)


_JSON_ARGUMENTS = '{"name": "{}", "arguments": '

# In the order in which they are tried on a template.
DIALECTS = (
    Dialect(  # read with the channels, not after an opener
        name="harmony",
        template_markers=(harmony.CHANNEL, harmony.CALL),
        opener="",
        closers=harmony.MARKERS,
        read=harmony.read_call,
        call_prefix=harmony.CALL_HEAD,
        is_single=True,
    ),
    Dialect(
        name="mistral_args",
        template_markers=("[TOOL_CALLS]", "[ARGS]"),
        opener="[TOOL_CALLS]",
        closers=("[ARGS]", "[CALL_ID]"),
        read=named_calls.read_mistral,
        call_prefix="[TOOL_CALLS]{}[ARGS]",
        id_length=9,
        id_prefix="",
    ),
    Dialect(
        name="mistral",
        template_markers=("[TOOL_CALLS]",),
        opener="[TOOL_CALLS]",
        closers=("[ARGS]", "[CALL_ID]"),
        read=named_calls.read_mistral,
        prefix="[TOOL_CALLS][",
        call_prefix=_JSON_ARGUMENTS,
        call_suffix="}",
        separator=", ",
        suffix="]",
        id_length=9,
        id_prefix="",
    ),
    Dialect(
        name="deepseek_v3",
        template_markers=(_CALLS_BEGIN, "```json"),
        opener=_CALLS_BEGIN,
        closers=(_CALLS_END, _CALL_BEGIN, _CALL_END, _SEP),
        read=NamedCalls(_CALL_BEGIN, "function" + _SEP, "\n", "```", _CALL_END).read,
        prefix=_CALLS_BEGIN,
        call_prefix=f"{_CALL_BEGIN}function{_SEP}{{}}\n```json\n",
        call_suffix=f"\n```{_CALL_END}",
        separator="\n",
        suffix=_CALLS_END,
    ),
    Dialect(
        name="deepseek_v31",
        template_markers=(_CALLS_BEGIN,),
        opener=_CALLS_BEGIN,
        closers=(_CALLS_END, _CALL_BEGIN, _CALL_END, _SEP),
        read=NamedCalls(_CALL_BEGIN, "", _SEP, "", _CALL_END).read,
        prefix=_CALLS_BEGIN,
        call_prefix=f"{_CALL_BEGIN}{{}}{_SEP}",
        call_suffix=_CALL_END,
        suffix=_CALLS_END,
    ),
    Dialect(
        name="kimi_k2",
        template_markers=(_SECTION_BEGIN, _KIMI_ARGUMENTS),
        opener=_SECTION_BEGIN,
        closers=(_SECTION_END, _KIMI_BEGIN, _KIMI_END, _KIMI_ARGUMENTS),
        read=NamedCalls(_KIMI_BEGIN, "", _KIMI_ARGUMENTS, "", _KIMI_END, has_ids=True).read,
        prefix=_SECTION_BEGIN,
        call_prefix=f"{_KIMI_BEGIN}functions.{{}}:0{_KIMI_ARGUMENTS}",
        call_suffix=_KIMI_END,
        suffix=_SECTION_END,
        is_numbered=True,
    ),
    Dialect(
        name="glm45",
        template_markers=("<arg_key>", "<arg_value>"),
        opener="<tool_call>",
        closers=("</tool_call>", *xml_calls.GLM.marks),
        read=xml_calls.GLM.read,
        call_prefix="<tool_call>{}\n",
        call_suffix="</tool_call>",
        separator="\n",
        arguments="pairs",
    ),
    Dialect(
        name="longcat_pairs",
        template_markers=("<longcat_arg_key>", "<longcat_arg_value>"),
        opener="<longcat_tool_call>",
        closers=("</longcat_tool_call>", *xml_calls.LONGCAT.marks),
        read=xml_calls.LONGCAT.read,
        call_prefix="<longcat_tool_call>{}\n",
        call_suffix="</longcat_tool_call>",
        separator="\n",
        arguments="longcat_pairs",
    ),
    Dialect(
        name="longcat",
        template_markers=("<longcat_tool_call>",),
        opener="<longcat_tool_call>",
        closers=("</longcat_tool_call>",),
        read=json_calls.read_calls,
        call_prefix="<longcat_tool_call>\n" + _JSON_ARGUMENTS,
        call_suffix="}\n</longcat_tool_call>",
        separator="\n",
    ),
    Dialect(
        name="deepseek_v32",
        template_markers=("｜DSML｜", "function_calls"),
        opener=dsml_calls.OPENER,
        closers=(dsml_calls.CLOSER,),
        read=dsml_calls.read_calls,
        prefix=f"{dsml_calls.OPENER}\n",
        call_prefix=f"{dsml_calls.CALL_BEGIN}{{}}{dsml_calls.NAME_END}\n",
        call_suffix=f"{dsml_calls.CALL_END}\n",
        suffix=dsml_calls.CLOSER,
        arguments="dsml",
        token=dsml_calls.TOKEN,
    ),
    Dialect(
        name="minimax_m2",
        template_markers=("<minimax:tool_call>", "<invoke name="),
        opener="<minimax:tool_call>",
        closers=("</minimax:tool_call>",),
        read=xml_calls.MINIMAX.read,
        prefix="<minimax:tool_call>\n",
        call_prefix='<invoke name="{}">\n',
        call_suffix="</invoke>\n",
        suffix="</minimax:tool_call>",
        arguments="invoke",
    ),
    Dialect(
        name="seed_oss",
        template_markers=("<seed:tool_call>", "<function="),
        opener="<seed:tool_call>",
        closers=("</seed:tool_call>",),
        read=xml_calls.SEED.read,
        call_prefix="<seed:tool_call>\n<function={}>\n",
        call_suffix="</function>\n</seed:tool_call>",
        separator="\n",
        arguments="xml",
    ),
    Dialect(
        name="cohere",
        template_markers=(_ACTION_BEGIN, '"tool_name"'),
        opener=_ACTION_BEGIN,
        closers=(_ACTION_END, *_COHERE_ANSWER),
        read=json_calls.read_calls,
        prefix=f"{_ACTION_BEGIN}[\n",
        call_prefix='    {"tool_call_id": "0", "tool_name": "{}", "parameters": ',
        call_suffix="}",
        separator=",\n",
        suffix=f"\n]{_ACTION_END}",
        is_single=True,  # ids count across calls, which a grammar for forced calls could not track
    ),
    Dialect(
        name="nemotron",
        template_markers=("<TOOLCALL>", "</TOOLCALL>"),
        opener="<TOOLCALL>",
        closers=("</TOOLCALL>",),
        read=json_calls.read_calls,
        prefix="<TOOLCALL>[",
        call_prefix=_JSON_ARGUMENTS,
        call_suffix="}",
        separator=", ",
        suffix="]</TOOLCALL>",
    ),
    Dialect(
        name="hunyuan_a13b",
        template_markers=("<tool_calls>", "</tool_calls>"),
        opener="<tool_calls>",
        closers=("</tool_calls>",),
        read=json_calls.read_calls,
        prefix="<tool_calls>[",
        call_prefix=_JSON_ARGUMENTS,
        call_suffix="}",
        separator=", ",
        suffix="]</tool_calls>",
    ),
    Dialect(
        name="qwen3_xml",
        template_markers=("<function=", "<parameter="),
        opener="<tool_call>",
        closers=("</tool_call>",),
        read=xml_calls.QWEN.read,
        call_prefix="<tool_call>\n<function={}>\n",
        call_suffix="</function>\n</tool_call>",
        separator="\n",
        arguments="xml",
    ),
    Dialect(
        name="hermes",
        template_markers=("<tool_call>",),
        opener="<tool_call>",
        closers=("</tool_call>",),
        read=json_calls.read_calls,
        call_prefix="<tool_call>\n" + _JSON_ARGUMENTS,
        call_suffix="}\n</tool_call>",
        separator="\n",
    ),
    Dialect(
        name="granite",
        template_markers=("<|tool_call|>",),
        opener="<|tool_call|>",
        closers=("<|/tool_call|>",),
        read=json_calls.read_calls,
        prefix="<|tool_call|>[",
        call_prefix=_JSON_ARGUMENTS,
        call_suffix="}",
        separator=", ",
        suffix="]",
    ),
    Dialect(
        name="gemma4",
        template_markers=("<|tool_call>", "<tool_call|>"),
        opener="<|tool_call>",
        closers=("<tool_call|>", _GEMMA_QUOTE),
        read=BracedCalls(_GEMMA_QUOTE).read,
        call_prefix="<|tool_call>call:{}{",
        call_suffix="}<tool_call|>",
        arguments="braces",
        quote=_GEMMA_QUOTE,
    ),
    Dialect(
        name="functiongemma",
        template_markers=("<start_function_call>", "<escape>"),
        opener="<start_function_call>",
        closers=("<end_function_call>", "<escape>"),
        read=BracedCalls("<escape>").read,
        call_prefix="<start_function_call>call:{}{",
        call_suffix="}<end_function_call>",
        arguments="braces",
        quote="<escape>",
    ),
    Dialect(
        name="lfm2",
        template_markers=("<|tool_call_start|>",),
        alternative_marker="<|tool_list_start|>",
        opener="<|tool_call_start|>",
        closers=("<|tool_call_end|>",),
        read=python_calls.read_python_or_json,
        prefix="<|tool_call_start|>[",
        call_prefix="{}(",
        call_suffix=")",
        separator=", ",
        suffix="]<|tool_call_end|>",
        arguments="python",
    ),
    Dialect(
        name="olmo3",
        template_markers=("<function_calls>", "</function_calls>"),
        excluded_marker="<invoke",
        opener="<function_calls>",
        closers=("</function_calls>",),
        read=python_calls.read_lines,
        prefix="<function_calls>\n",
        call_prefix="{}(",
        call_suffix=")",
        separator="\n",
        suffix="\n</function_calls>",
        arguments="python",
    ),
    Dialect(
        name="pythonic",
        template_markers=("[func_name1(",),
        opener="<|python_start|>",
        closers=("<|python_end|>",),
        bare_start="[",
        read=python_calls.read_calls,
        prefix="[",
        call_prefix="{}(",
        call_suffix=")",
        separator=", ",
        suffix="]",
        arguments="python",
    ),
    Dialect(
        name="llama3",
        template_markers=('"parameters"', "<|eot"),
        opener="<|python_tag|>",
        bare_start="{",
        read=json_calls.read_calls,
        call_prefix='{"name": "{}", "parameters": ',
        call_suffix="}",
        separator="; ",
    ),
)
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}

# Texts in the templates of models whose call format is not in the table, although parts of it look
# alike. Such a template shows no dialect, unless the dialect has the text too.
_UNKNOWN_FORMAT_MARKERS = ("<|channel|>", "<function_calls>", "<atem:")


def detect_dialect(template: str) -> Dialect | None:
    """The dialect that a chat template's source shows; None if it is unknown."""
    found = next((dialect for dialect in DIALECTS if _matches_template(template, dialect)), None)
    if found is None:
        return None
    is_foreign = any(
        mark in template and mark not in found.template_markers for mark in _UNKNOWN_FORMAT_MARKERS
    )
    return None if is_foreign else found


def _matches_template(template: str, dialect: Dialect) -> bool:
    if dialect.excluded_marker and dialect.excluded_marker in template:
        return False
    if dialect.alternative_marker and dialect.alternative_marker in template:
        return True
    return all(mark in template for mark in dialect.template_markers)


def supports_tools(template: str) -> bool:
    """Whether a chat template supports tools."""
    return re.search(r"\btools\b", template) is not None
