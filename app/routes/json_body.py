"""What every JSON body must be, whatever its fields: text that is Unicode, and numbers that are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, model_validator

from app.errors import BadRequest


class JsonBody(BaseModel):
    """Base of the bodies. JSON can write half a character ("\\ud800") and 1e999: neither goes further."""

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, value: Any) -> Any:
        check_json(value)
        return value


def check_json(body: Any) -> None:
    """Raises BadRequest naming the field of a lone surrogate or of a number that is not finite."""
    for keys, value in _walk(body):
        if isinstance(keys[-1], str) and not _is_unicode(keys[-1]):
            raise _refusal(keys[:-1], "contains a name with half of a surrogate pair: send whole characters")
        if isinstance(value, str) and not _is_unicode(value):
            raise _refusal(keys, "contains half of a surrogate pair: send whole characters")
        if isinstance(value, float) and not math.isfinite(value):
            raise _refusal(keys, "must be a finite number")


def _walk(body: Any) -> Iterator[tuple[Sequence[str | int], Any]]:
    """Each value with the keys that lead to it, after one that is empty. Takes memory for the depth alone."""
    keys: list[str | int] = [""]
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", body)])]
    while levels:  # no recursion: the client chooses the depth
        step = next(levels[-1], None)
        if step is None:
            levels.pop()
            keys.pop()
            continue
        keys[-1], value = step
        yield keys, value
        if isinstance(value, dict | list):
            levels.append(iter(value.items()) if isinstance(value, dict) else enumerate(value))
            keys.append("")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(keys: Sequence[str | int], problem: str) -> BadRequest:
    place = ".".join(str(key) for key in keys[1:])
    return BadRequest(f"{place or 'The body'} {problem}.", param=place or None)
