"""What is told to the operator in one line, without a trace."""

from __future__ import annotations


class OperatorError(Exception):
    """Something the operator has to set right: a setting, a path, a port. Its message is one line that says which."""
