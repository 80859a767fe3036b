"""The one error a user is meant to read."""


class UserError(Exception):
    """A mistake in the input: its message names the offending value and the fix, in one line."""
