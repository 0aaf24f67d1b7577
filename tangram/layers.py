"""Which layers of a model the ragged cache takes, read from the model's configuration.

Layers that attend to everything are compressed; sliding-window layers stay as vLLM keeps them. Every process
must reach the same answer, and some of them never build the model: so it comes from the configuration, and
the worker checks it against the layers that it built (:mod:`tangram.backend`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tangram.errors import UnsupportedError

FULL = ("full_attention", "attention")
WINDOW = "sliding_attention"


@dataclass(frozen=True)
class LayerKinds:
    """A model's layers.

    Attributes:
        full: indices of the layers that attend to everything, rising.
        window: how many sliding-window layers there are beside them.
        span: tokens that such a layer sees.
    """

    full: tuple[int, ...]
    window: int = 0
    span: int = 0


def layer_kinds(text_config: Any, layers: int) -> LayerKinds:
    """Sort the layers of a model.

    Args:
        text_config: the (text part of the) model's Hugging Face configuration, as vLLM holds it.
        layers: how many layers the model has.

    Raises:
        UnsupportedError: there is a layer that the ragged cache cannot work beside, or none that it could
            compress.
    """
    types = getattr(text_config, "layer_types", None)
    window: int | None = getattr(text_config, "sliding_window", None)
    if not types:
        types = [FULL[0] if window is None else WINDOW] * layers
    other = sorted(set(types) - {*FULL, WINDOW})
    if other:
        raise UnsupportedError(
            f"this model has layers of type {', '.join(other)}: the ragged cache works beside sliding-window "
            "layers only; serve the model with stock vLLM"
        )
    if len(types) != layers:
        raise UnsupportedError(
            f"this model's configuration names the types of {len(types)} layers, it has {layers}: layers "
            "that share or lack a cache cannot be used with the ragged cache"
        )
    full = tuple(i for i, kind in enumerate(types) if kind in FULL or window is None)
    if not full:
        raise UnsupportedError(
            "all layers of this model use sliding-window attention, so there is no history to compress: "
            "serve it with stock vLLM"
        )
    if window is None or len(full) == layers:
        return LayerKinds(full)
    return LayerKinds(full, layers - len(full), window)
