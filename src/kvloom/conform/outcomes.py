"""What a target answers to a call: results, or one of these exceptions."""

from collections.abc import Callable

from kvloom.conform.describe import Call, Operator, Results, Vector


class CallRefused(Exception):
    """Exception: the target refused the call."""


class NoAnswer(Exception):
    """Exception: the process of the target crashed, or took too long."""


class Unsupported(Exception):
    """Exception: the target does not support the call, or the runner cannot make it."""


Target = Callable[[Operator, Vector, Call], Results]
"""Function that runs a call, which it may write to, and returns results by name; raises ``CallRefused``."""
