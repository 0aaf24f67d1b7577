"""KeyDiff: keep the keys that point away from the mean key direction (arXiv 2504.15364).

Key-only, so it works for generated text as for prompts.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity, normalize


def keydiff(keys: torch.Tensor) -> torch.Tensor:
    """Minus the cosine between each key and the mean of the unit keys of its head.

    Args:
        keys: [heads, tokens, head_size], float32.

    Returns:
        [heads, tokens], from -1 to 1.
    """
    anchor = normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
    return -cosine_similarity(keys, anchor, dim=-1)
