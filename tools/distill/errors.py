"""The error that ends a distillation with one line for the user."""


class DistillError(Exception):
    """A distillation cannot run; the message is one line that names the file or option."""
