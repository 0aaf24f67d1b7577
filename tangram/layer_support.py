"""What an attention layer can ask for and the ragged cache cannot give.

The second half of :mod:`tangram.support`: some models say only in their code, when they build a layer, what
their attention needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tangram.errors import UnsupportedError
from tangram.support import STOCK

LAYER_FEATURES: Mapping[str, str] = {
    "alibi_slopes": "ALiBi",
    "kv_sharing_target_layer_name": "KV sharing between layers",
}
"""Arguments of an attention layer that must be unset, and what each is called."""


def check_layer(attn_type: str, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a layer that the ragged cache cannot serve.

    Args:
        attn_type: vLLM's name of the layer's kind; only "decoder" is served.
        arguments: the layer's arguments beyond heads and scale, by vLLM's names; unset is None, 0 or False.
            Those that ``LAYER_FEATURES`` does not know change the attention in ways that ours cannot follow.
    """
    used = [name for key, name in LAYER_FEATURES.items() if not _unset(arguments.get(key))]
    used += [
        f"attention with {key}"
        for key, value in arguments.items()
        if key not in LAYER_FEATURES and not _unset(value)
    ]
    if attn_type != "decoder":
        used.append(f"{attn_type.replace('_', '-')} attention")
    if used:
        raise UnsupportedError(
            f"{used[0]} cannot be used with the ragged cache, and this model has it. Instead: {STOCK}."
        )


def _unset(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value == 0)


def check_shape(kv_heads: int, head_size: int, head_size_v: int, expected: tuple[int, int]) -> None:
    """Raise UnsupportedError unless a layer has the model's one shape: pages hold heads of any layer.

    Args:
        kv_heads, head_size, head_size_v: the layer's KV heads, and elements of a key and of a value.
        expected: (KV heads on this rank, elements) that the geometry was built for.
    """
    if head_size_v != head_size:
        raise UnsupportedError(
            f"keys of {head_size} and values of {head_size_v} elements cannot share the pages of the ragged "
            f"cache. Instead: {STOCK}."
        )
    if (kv_heads, head_size) != expected:
        raise UnsupportedError(
            f"a layer of {kv_heads} KV heads of {head_size} elements beside layers of {expected[0]} of "
            f"{expected[1]} cannot be used with the ragged cache: all must be alike. Instead: {STOCK}."
        )
