"""How models are asked to write down speech; see ``AudioRules``."""

from __future__ import annotations

import msgspec

from engine.audio.speech import SpeechTokens

# English names by ISO 639 code, of the languages that models here name.
LANGUAGES = {
    **{"ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek"},
    **{"en": "English", "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino"},
    **{"fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian"},
    **{"ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch"},
    **{"pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish"},
    **{"th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese"},
}


class TranscriptionRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is asked for a transcription or a translation into English.

    The prompt is a conversation of one message of the user: the clip and an instruction. In all
    texts ``{code}`` and ``{name}`` stand for the language of the speech.
    """

    instruction: str = ""  # after the clip; empty: there is none
    language_instruction: str = ""  # the same, if the language is given
    suffix: str = ""  # follows the rendered conversation; may spell special tokens
    language_suffix: str = ""
    translation: str = ""  # the instruction for a translation; empty: the model does not translate
    needs_name: bool = False  # of the language: others than those in ``LANGUAGES`` are refused
    # The user's prompt is the system's message; otherwise it has no effect.
    takes_prompt: bool = False
    # Ends what the model writes before the text itself, unless the language is given.
    marker: str = ""
    # The tokens that the model is asked by instead, if it does nothing but transcribe (Whisper).
    speech: SpeechTokens | None = None

    def prompt_for(self, language: str | None) -> tuple[str, str]:
        """Return the instruction and the suffix for speech in this language, by its code."""
        if language is None:
            return self.instruction, self.suffix
        names = {"code": language, "name": LANGUAGES.get(language, language)}
        return self.language_instruction.format(**names), self.language_suffix.format(**names)
