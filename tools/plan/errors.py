"""What a person is told, in one line, when a plan cannot be made."""


class PlanError(ValueError):
    """What was asked for cannot be planned; the message is one line that names the option."""
