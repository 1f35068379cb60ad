"""The error that ends a plan with one line for the user."""


class PlanError(ValueError):
    """A request that cannot be planned; the message is one line that names the option."""
