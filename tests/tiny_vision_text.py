"""What the models of ``tests/tiny_vision.py`` need to be talked to: a tokenizer and a template.

    save_text(directory, QWEN)

A character is a token, so that prompts can be read. The templates are of the kinds that checkpoints
bring: for Qwen-VL's and Mistral's a string is a content, too; LLaVA's knows parts alone, and shows
all images before all texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_vision import END, IMAGE, IMAGE_END, ROW_END, START, VIDEO

TURN, TURN_END = 148, 149
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

QWEN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


def save_text(directory: Path, template: str = QWEN, **config: Any) -> None:
    """Write them beside a model; ``config`` goes to the tokenizer's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 0x120, c))
    written = [*"\u0120\u010a", *(c for c in letters if c not in "\u0120\u010a")][:TURN]
    vocabulary = {letter: id_ for id_, letter in enumerate(written)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(SPECIAL[id_], special=True, normalized=False) for id_ in sorted(SPECIAL)]
    )
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
