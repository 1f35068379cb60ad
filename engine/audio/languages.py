"""Names of the languages that Whisper knows."""

from __future__ import annotations

# English names by code: ISO 639-1, or -3 where that has none. Javanese has an older one.
_NAMES = {
    **{"af": "Afrikaans", "am": "Amharic", "ar": "Arabic", "as": "Assamese", "az": "Azerbaijani"},
    **{"ba": "Bashkir", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali", "bo": "Tibetan"},
    **{"br": "Breton", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh"},
    **{"da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish"},
    **{"et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish", "fo": "Faroese"},
    **{"fr": "French", "gl": "Galician", "gu": "Gujarati", "ha": "Hausa", "haw": "Hawaiian"},
    **{"he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "ht": "Haitian Creole", "hu": "Hungarian"},
    **{"hy": "Armenian", "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese"},
    **{"jw": "Javanese", "ka": "Georgian", "kk": "Kazakh", "km": "Khmer", "kn": "Kannada"},
    **{"ko": "Korean", "la": "Latin", "lb": "Luxembourgish", "ln": "Lingala", "lo": "Lao"},
    **{"lt": "Lithuanian", "lv": "Latvian", "mg": "Malagasy", "mi": "Maori", "mk": "Macedonian"},
    **{"ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay", "mt": "Maltese"},
    **{"my": "Myanmar", "ne": "Nepali", "nl": "Dutch", "nn": "Nynorsk", "no": "Norwegian"},
    **{"oc": "Occitan", "pa": "Punjabi", "pl": "Polish", "ps": "Pashto", "pt": "Portuguese"},
    **{"ro": "Romanian", "ru": "Russian", "sa": "Sanskrit", "sd": "Sindhi", "si": "Sinhala"},
    **{"sk": "Slovak", "sl": "Slovenian", "sn": "Shona", "so": "Somali", "sq": "Albanian"},
    **{"sr": "Serbian", "su": "Sundanese", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil"},
    **{"te": "Telugu", "tg": "Tajik", "th": "Thai", "tk": "Turkmen", "tl": "Tagalog"},
    **{"tr": "Turkish", "tt": "Tatar", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek"},
    **{"vi": "Vietnamese", "yi": "Yiddish", "yo": "Yoruba", "yue": "Cantonese", "zh": "Chinese"},
}


def language_name(code: str) -> str:
    """Return a language's English name in lower case, as OpenAI's API reports it; a code that is
    not known is returned."""
    return _NAMES.get(code, code).lower()


def code_of(given: str) -> str:
    """Return the code of a language given by its code or English name; a region does not matter.

    What is neither is returned in lower case.
    """
    codes = {name.lower(): code for code, name in _NAMES.items()}
    lower = given.strip().lower()
    return codes.get(lower, lower.partition("-")[0])
