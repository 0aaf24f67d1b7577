"""Which sampling a reply gets: what the request says, else the conversation, else the model, else we."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import BadRequest
from app.events import Sampling

DEFAULT_TEMPERATURE = 0.6
DEFAULT_TOP_P = 0.95
DEFAULT_MAX_TOKENS = 4096
"""A reply ends here unless somebody says otherwise: a model that never ends shall not fill its context."""
BUNDLED_MAX_TOKENS = 1024
"""The same for the bundled model, which often finds no end: of 16 replies seven ended, the longest after 507
tokens, and nine went on until 2,048."""

_RANGES: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 1e-3, 1.0),
    "max_tokens": (int, 1, 1_000_000),
    "seed": (int, -(2**63), 2**63 - 1),
}


def checked(values: Mapping[str, Any]) -> Sampling:
    """Sampling from JSON values; other fields are ignored. Raises BadRequest naming the field."""
    found: dict[str, Any] = {}
    for name, (kind, low, high) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        numeric = isinstance(value, int) or (kind is float and isinstance(value, float))
        if isinstance(value, bool) or not numeric or not low <= value <= high:
            word = "a number" if kind is float else "a whole number"
            raise BadRequest(f"{name} must be {word} from {low:g} to {high:g}.", param=name)
        found[name] = kind(value)
    return Sampling(**found)


def resolve(
    asked: Sampling | None,
    conversation: Mapping[str, Any],
    model: Mapping[str, float],
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> Sampling:
    """The sampling of one reply of the chat; each field from the first that names it.

    max_tokens: the reply's greatest length where nobody names one.
    """
    chosen = asked or Sampling()
    stored = checked(conversation)

    def first(name: str, default: Any) -> Any:
        for value in (getattr(chosen, name), getattr(stored, name), model.get(name)):
            if value is not None:
                return value
        return default

    return Sampling(
        temperature=first("temperature", DEFAULT_TEMPERATURE),
        top_p=first("top_p", DEFAULT_TOP_P),
        max_tokens=first("max_tokens", max_tokens),
        seed=first("seed", None),
    )


def completion_budget(asked: int | None, prompt_tokens: int, limit: int) -> int:
    """Tokens that a reply may have: what was asked, within what the context leaves. limit 0: not known."""
    room = limit - prompt_tokens if limit else DEFAULT_MAX_TOKENS
    return max(1, min(asked or room, room))
