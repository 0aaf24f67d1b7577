"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.token_bytes import TokenBytes
from tangram.client import TokenLogprob


def chat_logprobs(found: Sequence[TokenLogprob], top: int, spell: TokenBytes) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, with the `top` likeliest tokens each."""
    return {
        "content": [
            {
                **_entry(one.token, one.logprob, spell),
                "top_logprobs": [_entry(*other, spell) for other in _likeliest(one, top)],
            }
            for one in found
        ],
        "refusal": None,
    }


def completion_logprobs(
    found: Sequence[TokenLogprob], top: int, spell: TokenBytes, offset: int
) -> dict[str, Any]:
    """The four lists of the older API.

    offset: characters of the text before these tokens.
    """
    tokens = [_text(spell(one.token)) for one in found]
    offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
    likeliest = [{_text(spell(token)): value for token, value in _likeliest(one, top)} for one in found]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": likeliest if top else None,
        "text_offset": offsets,
    }


def _likeliest(one: TokenLogprob, top: int) -> list[tuple[int, float]]:
    # The engine adds the chosen token to the likeliest where it is not one of them.
    return sorted(one.top, key=lambda pair: -pair[1])[:top]


def _entry(token: int, logprob: float, spell: TokenBytes) -> dict[str, Any]:
    spelled = spell(token)
    return {"token": _text(spelled), "logprob": logprob, "bytes": list(spelled)}


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")
