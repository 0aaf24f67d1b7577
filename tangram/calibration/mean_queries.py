"""What heads are asked on average while a model reads a text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tangram.calibration.model import Reader
from tangram.errors import UnsupportedError
from tangram.profile_file import Matrix, as_matrix
from tangram.rotary import Rotary, find_rotary

DIGITS = 4
"""Of a mean query's numbers in a file. Orders of keys need no more: the queries themselves vary far more."""


def rotary_of(reader: Reader) -> Rotary | None:
    """How a model rotates; None where it does not. Raises UnsupportedError where that is not known."""
    known = reader.identity
    sizes = (known.layers, known.head_size, known.max_model_len)
    return find_rotary(reader.text_config, *sizes, reader.device)


class QuerySums:
    """Adds up the queries of one text, read from its beginning, without their rotation.

    Where it is not known how the model rotates, nothing is added up.
    """

    def __init__(self, reader: Reader) -> None:
        self._rows = {layer: row for row, layer in enumerate(reader.kinds.full)}
        self._seen = dict.fromkeys(self._rows, 0)
        self._sums: dict[int, torch.Tensor] = {}
        self._rotary, self._known = None, True
        try:
            self._rotary = rotary_of(reader)
        except UnsupportedError:
            self._known = False

    def see(self, layer: int, queries: torch.Tensor, kv_heads: int) -> None:
        """The next rotated queries of a layer, [query_heads, tokens, head_size]."""
        row = self._rows.get(layer)
        if row is None or not self._known:
            return
        begin, count = self._seen[layer], queries.shape[1]
        self._seen[layer] += count
        asked = queries.float()
        if self._rotary is not None:
            at = torch.arange(begin, begin + count, device=queries.device)
            cos, sin = self._rotary.phases(-at, torch.tensor([row], device=queries.device))
            asked = self._rotary.turn(asked, cos[0], sin[0])
        total = asked.unflatten(0, (kv_heads, -1)).mean(dim=1).double().sum(dim=1)
        self._sums[layer] = self._sums.get(layer, torch.zeros_like(total)) + total

    def means(self) -> list[list[list[float]]] | None:
        """[layers][kv_heads][head_size], over tokens and the query heads of a KV head; None where nothing is
        known."""
        if not self._sums:
            return None
        means = torch.stack([self._sums[layer] / self._seen[layer] for layer in self._rows]).cpu()
        return [[[rounded(x) for x in head] for head in layer] for layer in means.tolist()]


def over_samples(every: Iterable[list[list[list[float]]] | None]) -> tuple[Matrix, ...] | None:
    """The mean of samples' means, each of which counts alike; None where one is not known."""
    total, count = np.zeros(()), 0
    for means in every:
        if means is None:
            return None
        total, count = total + np.array(means), count + 1
    if not count:
        return None
    layers = (total / count).tolist()
    return tuple(as_matrix([rounded(x) for x in head] for head in layer) for layer in layers)


def rounded(number: float) -> float:
    """To ``DIGITS`` significant digits."""
    return float(f"{number:.{DIGITS}g}")
