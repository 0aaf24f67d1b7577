"""What can be wrong, and the exit code for each. docs/operations.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Code(IntEnum):
    """Exit codes of `python -m app`, beside 0 (a wanted end) and 1 (failed)."""

    SETTING = 2
    """Also of what is found before: a setting that cannot be read, the app's own port taken."""
    NOT_WRITABLE = 10
    NO_GPU = 11
    DRIVER_TOO_OLD = 12
    GPU_TOO_OLD = 13
    TOO_LITTLE_MEMORY = 14
    GATED_MODEL = 15
    CLOCK = 16
    MISSING_LIBRARY = 17
    DATABASE = 18


@dataclass(frozen=True)
class Problem:
    """Something that the engine or the product could not work with; `text` says what to do."""

    code: Code
    text: str


class PreflightFailed(Exception):
    """Starting makes no sense. `code` is of the first problem."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems
        self.code = int(problems[0].code)
