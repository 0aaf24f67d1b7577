"""A setting's name as the user wrote it: an option of the command line, or a variable of the environment."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import fields

from tangram.config import TangramConfig
from tangram.errors import ConfigError


def option(field: str) -> str:
    """The command-line option of a configuration field."""
    return f"--tangram-{field.replace('_', '-')}"


def variable(field: str) -> str:
    """The environment variable of a configuration field."""
    return f"TANGRAM_{field.upper()}"


def as_asked(error: ConfigError, given: Container[str], environment: Mapping[str, str]) -> ConfigError:
    """The error with the setting's name as the user knows it; ``field`` stays. Others are left as they are.

    Args:
        given: fields that were set by an option.
    """
    if error.field not in {field.name for field in fields(TangramConfig)}:
        return error
    of_environment = error.field not in given and environment.get(variable(error.field), "") != ""
    name = variable(error.field) if of_environment else option(error.field)
    renamed = ConfigError(name, str(error).removeprefix(f"{error.field}: "))
    renamed.field = error.field
    return renamed
