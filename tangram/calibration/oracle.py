"""What every cached token of every head is worth, judged offline.

``kvzip`` looks at what the model attends to when it repeats the text (arXiv 2505.23416): far too dear for an
engine, and the best judge of budgets (docs/calibration.md). The others are the engine's own scorers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tangram.calibration.framing import Frame
from tangram.calibration.mean_queries import QuerySums, rotary_of
from tangram.calibration.model import Reader, branch, check_watched
from tangram.config import TangramConfig
from tangram.key_needs import key_scores, shares_above
from tangram.rotary import Rotary
from tangram.scorers import Chunk, Need, get_scorer

PART = 1024
"""Tokens of the text that are repeated at once. Each part follows the text directly, as if the ones before
had not been repeated, so that a model of any length has to hold the text and one part only."""
OnRead = Callable[[object], None]
"""Is given the cache of keys and values once the text has been read, and before it is repeated."""


class LargestWeight:
    """The largest attention weight that each cached token gets from any query of its KV head's group.

    Attributes:
        scores: float32 [layers, kv_heads, tokens].
        kv_heads: by layer of the model, as seen.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        tokens: int,
        device: torch.device,
        sums: QuerySums | None = None,
    ) -> None:
        self.sums = sums
        self.scores = torch.zeros(len(layers), kv_heads, tokens, device=device)
        self.kv_heads: dict[int, int] = {}
        self.wants_weights = False
        self._rows = {layer: row for row, layer in enumerate(layers)}

    def see_queries(self, layer: int, queries: torch.Tensor, scale: float, kv_heads: int) -> None:
        """Who attends, and what is asked while the text itself is read."""
        self.kv_heads[layer] = kv_heads
        if self.sums is not None and not self.wants_weights:
            self.sums.see(layer, queries, kv_heads)

    def see_weights(self, layer: int, head: int, weights: torch.Tensor) -> None:
        """See :class:`tangram.calibration.attention.Watcher`."""
        if layer in self._rows:
            worth = self.scores[self._rows[layer], head]
            torch.maximum(worth, weights[..., : worth.shape[0]].amax(dim=(0, 1)), out=worth)

    def held(self, layer: int, keys: int) -> None:
        """All of them."""


class LastQueries:
    """The last ``width`` queries of every layer that is calibrated."""

    wants_weights = False

    def __init__(self, layers: Sequence[int], width: int, sums: QuerySums | None = None) -> None:
        self.sums = sums
        self.queries: dict[int, torch.Tensor] = {}
        self.scales: dict[int, float] = {}
        self.kv_heads: dict[int, int] = {}
        self._layers, self._width = frozenset(layers), width

    def see_queries(self, layer: int, queries: torch.Tensor, scale: float, kv_heads: int) -> None:
        """See :class:`tangram.calibration.attention.Watcher`."""
        if self.sums is not None:
            self.sums.see(layer, queries, kv_heads)
        if layer in self._layers:
            self.kv_heads[layer], self.scales[layer] = kv_heads, scale
            before = [self.queries[layer]] if layer in self.queries else []
            self.queries[layer] = torch.cat([*before, queries.float()], dim=1)[:, -self._width :]

    def see_weights(self, layer: int, head: int, weights: torch.Tensor) -> None:
        """Is never called."""

    def held(self, layer: int, keys: int) -> None:
        """All of them."""


class QueryWatcher:
    """What every layer is asked, and nothing else."""

    wants_weights = False

    def __init__(self, sums: QuerySums) -> None:
        self._sums = sums
        self.kv_heads: dict[int, int] = {}

    def see_queries(self, layer: int, queries: torch.Tensor, scale: float, kv_heads: int) -> None:
        """See :class:`tangram.calibration.attention.Watcher`."""
        self.kv_heads[layer] = kv_heads
        self._sums.see(layer, queries, kv_heads)

    def see_weights(self, layer: int, head: int, weights: torch.Tensor) -> None:
        """Is never called."""

    def held(self, layer: int, keys: int) -> None:
        """All of them."""


def largest_weights(
    reader: Reader,
    frame: Frame,
    context: Sequence[int],
    on_read: OnRead | None = None,
    sums: QuerySums | None = None,
) -> torch.Tensor:
    """``kvzip``: read the context, then be asked to repeat it, part by part, with the context as the answer.

    Returns:
        float32 [layers, kv_heads, tokens], tokens being those in front of the context and its own.
    """
    tokens = [*frame.before, *context]
    cache = reader.new_cache()
    watcher = LargestWeight(reader.kinds.full, reader.identity.kv_heads, len(tokens), reader.device, sums)
    reader.read(tokens, cache, watcher)
    check_watched(reader, watcher.kv_heads)
    if on_read is not None:
        on_read(cache)
    watcher.wants_weights = True
    for start in range(0, len(context), PART):
        reader.read([*frame.request(context[:start]), *context[start : start + PART]], branch(cache), watcher)
    return watcher.scores


def scored(
    reader: Reader,
    frame: Frame,
    context: Sequence[int],
    name: str,
    geometry: TangramConfig,
    on_read: OnRead | None = None,
    sums: QuerySums | None = None,
) -> torch.Tensor:
    """A scorer's judgement of every chunk that the engine would have sealed, at the moment of sealing.

    Returns:
        float32 [layers, kv_heads, tokens of all sealed chunks].
    """
    tokens = [*frame.before, *context]
    scorer, cache = get_scorer(name), reader.new_cache()
    watcher = LastQueries(reader.kinds.full, geometry.query_window, sums)
    rotary = None
    if Need.ROTARY in scorer.needs:
        rotary = rotary_of(reader)
    read, scores = 0, []
    for boundary in boundaries(len(tokens), geometry):
        start = boundary - geometry.chunk - geometry.window
        reader.read(tokens[read:boundary], cache, watcher)
        check_watched(reader, watcher.kv_heads)
        read = boundary
        scores.append(
            torch.stack(
                [
                    scorer(chunk_of(reader, cache, watcher, row, start, geometry, rotary))
                    for row in range(len(reader.kinds.full))
                ]
            )
        )
    if on_read is not None:
        on_read(cache)
    return torch.cat(scores, dim=-1)


def boundaries(tokens: int, geometry: TangramConfig) -> range:
    """Where an engine would seal a text of so many tokens, a chunk each time."""
    return range(geometry.chunk + geometry.window, tokens + 1, geometry.chunk)


def key_needs(reader: Reader, cache: object, tokens: int, geometry: TangramConfig) -> torch.Tensor:
    """What the heads would need by their keys alone (:mod:`tangram.key_needs`): means over the chunks that
    the engine would have sealed.

    Args:
        cache: holds the keys of at least so many ``tokens``.

    Returns:
        float64 [layers, kv_heads].
    """
    layers, heads = len(reader.kinds.full), reader.identity.kv_heads
    every = torch.arange(heads, device=reader.device)
    found = []
    for start in range(0, tokens - geometry.chunk - geometry.window + 1, geometry.chunk):
        scores = [
            key_scores(
                torch.full((heads,), row, device=reader.device),
                every,
                reader.keys(cache, layer)[:, start : start + geometry.chunk].float(),
            )
            for row, layer in enumerate(reader.kinds.full)
        ]
        found.append(shares_above(torch.cat(scores)).double().cpu())
    return torch.stack(found).mean(dim=0).reshape(layers, heads)


def chunk_of(
    reader: Reader,
    cache: object,
    watcher: LastQueries,
    row: int,
    start: int,
    geometry: TangramConfig,
    rotary: Rotary | None,
    mean_query: torch.Tensor | None = None,
) -> Chunk:
    """The chunk that begins at ``start`` as the KV heads of one layer see it.

    Args:
        mean_query: [kv_heads, head_size] of this layer, for scorers that need it.
    """
    layer, heads = reader.kinds.full[row], reader.identity.kv_heads
    end, device = start + geometry.chunk, reader.device
    keys = reader.keys(cache, layer).float()
    boundary, queries = end + geometry.window, watcher.queries[layer]
    return Chunk(
        layers=torch.full((heads,), row, device=device),
        heads=torch.arange(heads, device=device),
        keys=keys[:, start:end],
        sink=geometry.sink if start == 0 else 0,
        values=reader.values(cache, layer)[:, start:end].float(),
        positions=torch.arange(start, end, device=device),
        recent=keys[:, end:boundary],
        queries=queries.unflatten(0, (heads, -1)),
        query_positions=torch.arange(boundary - queries.shape[1], boundary, device=device),
        scale=torch.full((heads,), watcher.scales[layer], device=device),
        rotary=rotary,
        mean_query=mean_query,
    )


def judge(
    reader: Reader,
    frame: Frame,
    context: Sequence[int],
    oracle: str,
    geometry: TangramConfig,
    on_read: OnRead | None = None,
    sums: QuerySums | None = None,
) -> torch.Tensor:
    """Scores of all tokens that could be dropped, float32 [layers, kv_heads, tokens].

    The latest ``window`` tokens, which the engine always keeps, are left out.

    Args:
        oracle: one of :data:`tangram.calibration.settings.ORACLES`.
        geometry: chunk, window, sink and query window of the engine.
        sums: is told what is asked while the text is read.
    """
    if oracle == "kvzip":
        scores = largest_weights(reader, frame, context, on_read, sums)
        return scores[..., : scores.shape[-1] - geometry.window]
    return scored(reader, frame, context, oracle, geometry, on_read, sums)


def asked(
    reader: Reader, frame: Frame, context: Sequence[int], oracle: str, geometry: TangramConfig
) -> QuerySums:
    """What :func:`judge` would tell its ``sums``, to the last bit: the text is read in the same steps, and
    nothing is judged.

    Args:
        oracle, geometry: as there.
    """
    tokens = [*frame.before, *context]
    ends = [len(tokens)] if oracle == "kvzip" else boundaries(len(tokens), geometry)
    sums = QuerySums(reader)
    watcher = QueryWatcher(sums)
    reader.read(tokens[: ends[-1]], reader.new_cache(), watcher, ends)
    check_watched(reader, watcher.kv_heads)
    return sums


def needs(scores: torch.Tensor, target: float, scope: str, sink: int) -> torch.Tensor:
    """The share of its tokens that each head has among the best ``target`` of all.

    Args:
        scores: [layers, kv_heads, tokens].
        scope: ``model``: the best of all heads are taken together; ``layer``: within each layer.
        sink: so many first tokens of every head come before all others.

    Returns:
        float64 [layers, kv_heads], of mean ``target`` (in each layer, in scope ``layer``) to a token.
    """
    layers, heads, tokens = scores.shape
    ranked = scores.clone()
    ranked[..., :sink] = torch.inf
    rivals = ranked.reshape(1 if scope == "model" else layers, -1)
    kept = round(target * rivals.shape[1])
    best = rivals.argsort(dim=1, descending=True, stable=True)[:, :kept] // tokens
    counts = torch.stack([torch.bincount(row, minlength=rivals.shape[1] // tokens) for row in best])
    return counts.reshape(layers, heads).double().cpu() / tokens
