"""The file that overrides a model's own chat template."""

from __future__ import annotations

from pathlib import Path

from server.setting_sources import InvalidSettings


def read_chat_template(path: Path | None) -> str | None:
    """The template's source; None to use the model's own.

    Raises:
        InvalidSettings: the file cannot be read as text, or is not a valid template.
    """
    if path is None:
        return None
    try:
        source = path.read_text("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    else:
        # Imported only if a template is given, so that other servers start without jinja2.
        from engine.text.template_worker import syntax_error

        problem = syntax_error(source)
        if problem is None:
            return source
        raise InvalidSettings(f"--chat-template: {path} is no template: {problem}")
    raise InvalidSettings(f"--chat-template: cannot read {path}: {reason}")
