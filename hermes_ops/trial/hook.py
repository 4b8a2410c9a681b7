"""Prepares the user's interpreter."""


def install() -> None:
    """Do nothing."""
