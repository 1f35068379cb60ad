"""A tokenizer and a chat template for the models of ``tests/tiny_vision.py``.

    save_text(directory, QWEN)

Each character is a token, so that prompts are readable; but two newlines are one token, and so are
three. The templates are of the kinds found in checkpoints: most also accept a string as content;
LLaVA's accepts only parts, and puts all images before all texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_vision import END, IMAGE, IMAGE_END, ROW_END, START, VIDEO

THREE_NEWLINES, TURN, TURN_END = 147, 148, 149
SPECIAL = {
    TURN: "<|im_start|>",
    TURN_END: "<|im_end|>",
    IMAGE: "<|image_pad|>",
    ROW_END: "[IMG_BREAK]",
    IMAGE_END: "[IMG_END]",
    START: "<|vision_start|>",
    END: "<|vision_end|>",
    VIDEO: "<|video_pad|>",
}

GEMMA_SPECIAL = {
    **{**SPECIAL, TURN: "<start_of_turn>", TURN_END: "<end_of_turn>"},
    **{START: "<start_of_image>", IMAGE: "<image_soft_token>", END: "<end_of_image>"},
}
# Ordinary text in Idefics3, tokens in SmolVLM, which here has some of them.
IDEFICS3_SPECIAL = {
    **{**SPECIAL, IMAGE: "<image>", START: "<fake_token_around_image>"},
    **{END: "<end_of_utterance>", VIDEO: "<global-img>"},
}
SMOLVLM_SPECIAL = {
    **IDEFICS3_SPECIAL,
    **{156: "<row_1_col_1>", 157: "<row_1_col_2>", 158: "<row_2_col_1>"},
}
INTERNVL_SPECIAL = {**SPECIAL, IMAGE: "<IMG_CONTEXT>", START: "<img>", END: "</img>"}
COHERE_SPECIAL = {
    **{**SPECIAL, IMAGE: "<|IMG_PATCH|>", START: "<|START_OF_IMG|>", END: "<|END_OF_IMG|>"},
    VIDEO: "<|IMG_LINE_BREAK|>",
}
LFM2_SPECIAL = {
    **{**SPECIAL, IMAGE: "<image>", START: "<|image_start|>", END: "<|image_end|>"},
    **{VIDEO: "<|img_thumbnail|>", 156: "<|img_row_1_col_1|>", 157: "<|img_row_2_col_1|>"},
}
MINICPM_SPECIAL = {
    **{**SPECIAL, START: "<image>", END: "</image>", ROW_END: "<slice>", IMAGE_END: "</slice>"},
    **{156: "<image_id>", 157: "</image_id>"},
}
LLAMA4_SPECIAL = {
    **{**SPECIAL, IMAGE: "<|patch|>", START: "<|image_start|>", END: "<|image_end|>"},
    **{VIDEO: "<|image|>", ROW_END: "<|tile_x_separator|>", IMAGE_END: "<|tile_y_separator|>"},
}
_NEWLINE = "\u010a"

QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IDEFICS3 = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
AYA = IDEFICS3  # its placeholder is no token
COHERE = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|IMG_PATCH|>")
MINICPM = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
LLAMA4 = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")
INTERNVL = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
MISTRAL = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{% if message.content is string %}"
    "<|im_start|>{{ message.content }}<|im_end|>{% else %}<|im_start|>"
    "{% for block in message.content %}{% if block.type == 'text' %}{{ block.text }}"
    "{% elif block.type in ['image', 'image_url'] %}<|image_pad|>"
    "{% else %}{{ raise_exception('Only text and image blocks are supported') }}{% endif %}"
    "{% endfor %}<|im_end|>{% endif %}"
    "{% elif message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}{% endfor %}"
)
LLAVA = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}"
    "<|image_pad|>\n{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }} {% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GEMMA3 = (
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for item in message.content %}{% if item.type == 'image' %}<start_of_image>"
    "{% elif item.type == 'text' %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA4 = GEMMA3.replace("<start_of_image>", "\n\n<image_soft_token>\n\n")


def save_text(
    directory: Path,
    template: str = QWEN,
    special: Mapping[int, str] = SPECIAL,
    **config: Any,
) -> None:
    """Write the tokenizer and the template beside a model.

    Args:
        directory: the model's directory.
        template: the chat template.
        special: special tokens by their ids.
        config: additional tokenizer config.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 0x120, c))
    written = [*"\u0120\u010a", *(c for c in letters if c not in "\u0120\u010a")][:TURN]
    merges = [(_NEWLINE, _NEWLINE), (2 * _NEWLINE, _NEWLINE)]
    written[-2:] = ["".join(pair) for pair in merges]
    vocabulary = {letter: id_ for id_, letter in enumerate(written)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special[id_], special=True, normalized=False) for id_ in sorted(special)]
    )
    assert tokenizer.token_to_id(special[IMAGE]) == IMAGE
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": special[TURN_END], **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
