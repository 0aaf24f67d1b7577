"""Every error that the plugin raises on purpose, in one place."""

from __future__ import annotations


class TangramError(Exception):
    """Base of all errors of the plugin and of its client."""


class ConfigError(TangramError):
    """A configuration field has a value that cannot work.

    Args:
        field: the field's name, as in :class:`tangram.config.TangramConfig`.
        message: what is wrong and what to do.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unreachable(ConfigError):
    """The model's hub does not answer. It may later: worth another try, unlike other settings."""


class ProfileError(TangramError):
    """A profile file is missing, damaged, or made for another model."""


class UnsupportedError(TangramError):
    """vLLM was asked for a feature that the ragged cache cannot serve."""


class CacheIntegrityError(TangramError):
    """The cache's own bookkeeping contradicts itself: a bug, reported instead of wrong answers."""


class EngineUnavailable(TangramError):
    """The engine does not answer: starting, restarting, or gone."""


class EngineRejected(TangramError):
    """The engine answered with an error.

    Args:
        status: the HTTP status of the answer.
        message: the engine's own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
