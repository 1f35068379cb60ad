"""What a person is told, in one line, when a distillation cannot go on."""


class DistillError(Exception):
    """Why a distillation cannot run; the message is one line that names the file or option."""
