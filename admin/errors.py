"""Errors of the admin console."""

from __future__ import annotations


class AdminError(Exception):
    """Base of everything that the admin console raises by itself."""


class BadSnapshot(AdminError):
    """The engine's memory report does not have the agreed shape; the message names the field."""


class TuneError(AdminError):
    """A change of the engine's settings was refused; the message is a sentence for the operator."""


class NotAllowed(AdminError):
    """The caller is not a signed-in administrator."""
