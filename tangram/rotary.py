"""A model's rotary position embedding, as far as scores need it: to take a rotation off, or put another on.

Only frequencies count: what some variants multiply cosine and sine by stays on a vector whichever way it is
turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tangram.errors import UnsupportedError

FUTURE = 512
"""Positions behind a boundary over which scores average the rotation of queries to come."""

INTERLEAVED = frozenset({"glm", "glm4", "gptj", "ernie4_5", "ernie4_5_moe", "helium"})
"""Model types that rotate neighbouring elements; all others rotate the two halves of the rotated part.
``tests/tangram/test_rotary.py`` compares them with transformers' own code."""

UNKNOWN = frozenset(
    {
        "blt",
        "chatglm",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "exaone4",
        "exaone_moe",
        "deepseek_v4",
        "nemotron-nas",
        "granitemoehybrid",
        "llama4",
        "llama4_text",
    }
)
"""Model types whose layers do not all rotate as their configuration alone says, or otherwise here than
there: vLLM puts the halves of Llama 4's heads where transformers has neighbours."""


@dataclass(frozen=True)
class Rotary:
    """Which pairs of elements are rotated, and how fast.

    Attributes:
        frequencies: float32 [layers, pairs], radians a position; 0 where a layer is not rotated. The first
            ``2 * pairs`` elements of a head are rotated.
        interleaved: pairs are neighbours (2i, 2i + 1) instead of (i, i + pairs).
    """

    frequencies: torch.Tensor
    interleaved: bool = False

    def phases(self, positions: torch.Tensor, layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, float32 [heads, 1, positions, pairs], for the layers of some heads [heads]."""
        angles = positions.float()[None, None, :, None] * self.frequencies[layers][:, None, None]
        return angles.cos(), angles.sin()

    def turn(self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``[..., head_size]`` by phases that broadcast against ``[..., pairs]``.

        Means of phases work too: turning is linear in them.
        """
        pairs = self.frequencies.shape[1]
        turned, rest = vectors[..., : 2 * pairs], vectors[..., 2 * pairs :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = turned[..., :pairs], turned[..., pairs:]
        a, b = a * cos - b * sin, b * cos + a * sin
        both = torch.stack((a, b), dim=-1).flatten(-2) if self.interleaved else torch.cat((a, b), dim=-1)
        # What is not rotated keeps the shape that the phases may have broadcast the rest to.
        return torch.cat((both, rest.expand(*both.shape[:-1], rest.shape[-1])), dim=-1)


def find_rotary(
    hf_config: Any, layers: int, head_size: int, max_model_len: int, device: torch.device
) -> Rotary | None:
    """The rotary embedding of a model's full-attention layers.

    Args:
        hf_config: the text part of a Hugging Face configuration.
        max_model_len: tokens that the engine serves: vLLM chooses long or short factors by it, once.

    Returns:
        None where the model has no rotary embedding.

    Raises:
        UnsupportedError: it is of a kind that cannot be taken off again.
    """
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    model = str(getattr(hf_config, "model_type", ""))
    if model in UNKNOWN:
        raise _unsupported(f"how models of type {model} rotate")
    # Models that mix kinds of layers name the parameters of each kind.
    layer_type = "full_attention" if isinstance(parameters.get("full_attention"), dict) else None
    parameters = parameters if layer_type is None else parameters[layer_type]
    if not parameters:
        return None
    if "mrope_section" in parameters or "rope_theta" not in parameters:
        raise _unsupported(f"how models of type {model} rotate")
    one = _frequencies(hf_config, parameters, layer_type, head_size, max_model_len)
    rotated = getattr(hf_config, "no_rope_layers", None) or [1] * layers  # 1: this layer is rotated
    if len(rotated) != layers:
        raise _unsupported(f"which layers models of type {model} rotate")
    table = torch.stack([one if flag else torch.zeros_like(one) for flag in rotated])
    return Rotary(table.to(device), model in INTERLEAVED)


def _frequencies(
    hf_config: Any, parameters: dict[str, Any], layer_type: str | None, head_size: int, max_model_len: int
) -> torch.Tensor:
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        width = getattr(hf_config, "rotary_dim", None) or int(
            head_size * parameters.get("partial_rotary_factor", 1.0)
        )
        # Named, as models are built where another device is the default, and one of them holds no numbers.
        powers = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        return 1.0 / parameters["rope_theta"] ** powers
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        raise _unsupported(f"rotary embeddings of type {kind}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        found, _ = ROPE_INIT_FUNCTIONS[kind](
            hf_config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
        )
    except KeyError as missing:
        raise _unsupported(f"a rotary embedding of type {kind} without {missing}") from None
    frequencies: torch.Tensor = found.float()
    return frequencies


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is not known, which the scorers expected_attention and keyvalue_query must know: choose "
        "another, such as keyvalue"
    )
