"""The engine's cache offline, in transformers: what a model says with budgets that no engine runs with now.

All keys and values stay; which of them a KV head still has is a mask, updated at the same lengths and by
the same scorers as in the engine (:mod:`tangram.sealing`): so a query sees the kept tokens of the sealed
chunks and all later ones. With static budgets it gives the engine's tokens
(tests/engine/test_accuracy_replay.py). Layers with a sliding window see what they always see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch.nn.functional import log_softmax

from tangram.advice import shape_of
from tangram.calibration.attention import watched_by
from tangram.calibration.mean_queries import rotary_of
from tangram.calibration.model import Reader, branch
from tangram.calibration.oracle import LastQueries, chunk_of
from tangram.config import TangramConfig
from tangram.geometry import Geometry
from tangram.mean_queries import MeanQueries, scorer_in_force
from tangram.profile import Profile, in_force
from tangram.scorers import Need, get_scorer
from tangram.sealing import comparable


def ranked_by(reader: Reader, config: TangramConfig) -> tuple[Profile, str]:
    """The profile that decides about a model's budgets, and the name of the scorer in force with it.

    Raises:
        ProfileError, UnsupportedError: they cannot work, see
            :func:`tangram.mean_queries.scorer_in_force`.
    """
    profile = in_force(config, shape_of(reader.identity))
    return profile, scorer_in_force(config, profile, lambda: rotary_of(reader))


class Replay:
    """One conversation's cache; it watches the model's attention
    (:class:`tangram.calibration.attention.Watcher`).

    Args:
        reader, head: see :func:`tangram.calibration.model.load_whole`.
        geometry: says when chunks are sealed and, unless ``dynamic``, what each head keeps.
        dynamic: each chunk's budgets are found by its own scores: the best of all heads are taken together.
        floor: the share that each head keeps of a chunk even so.

    Attributes:
        kept: bool [layers, kv_heads, capacity].
        length: tokens in the cache.
    """

    wants_weights = False

    def __init__(
        self,
        reader: Reader,
        head: Any,
        config: TangramConfig,
        geometry: Geometry,
        capacity: int,
        dynamic: bool = False,
        floor: float = 0.05,
    ) -> None:
        self.reader, self.head, self.config, self.geometry = reader, head, config, geometry
        self.dynamic, self.floor = dynamic, floor
        profile, name = ranked_by(reader, config)
        self.scorer = get_scorer(name)
        self.length = 0
        self.cache = reader.new_cache()
        self.kept = torch.ones(
            geometry.layers, geometry.kv_heads, capacity, dtype=torch.bool, device=reader.device
        )
        self.watcher = LastQueries(reader.kinds.full, config.query_window)
        self.rotary = rotary_of(reader) if Need.ROTARY in self.scorer.needs else None
        self.mean_queries = None
        if Need.MEAN_QUERY in self.scorer.needs and min(geometry.keep) < geometry.chunk:
            self.mean_queries = MeanQueries.of_profile(profile, rotary_of(reader), reader.device)
        self._rows = {layer: row for row, layer in enumerate(reader.kinds.full)}
        keep = [[geometry.keep[tier] for tier in row] for row in geometry.head_tier]
        self._keep = torch.tensor(keep, device=reader.device)

    def see_queries(self, layer: int, queries: torch.Tensor, scale: float, kv_heads: int) -> None:
        """The last ones are what some scorers ask for."""
        self.watcher.see_queries(layer, queries, scale, kv_heads)

    def see_weights(self, layer: int, head: int, weights: torch.Tensor) -> None:
        """Is never called."""

    def held(self, layer: int, keys: int) -> torch.Tensor | None:
        """See :class:`tangram.calibration.attention.Watcher`."""
        row = self._rows.get(layer)
        return None if row is None else self.kept[row, :, :keys]

    def copy(self) -> Replay:
        """One that goes on from here and leaves this as it is."""
        other = copy(self)
        other.cache, other.kept, other.watcher = branch(self.cache), self.kept.clone(), copy(self.watcher)
        other.watcher.queries = dict(self.watcher.queries)
        return other

    def feed(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """Read tokens, in steps that end where a chunk is sealed. Yields the states behind each step,
        [tokens of the step, hidden_size]."""
        start = 0
        while start < len(tokens):
            step = tokens[start : start + self.geometry.next_boundary(self.length) - self.length]
            ids = torch.tensor([list(step)], dtype=torch.long, device=self.reader.device)
            with torch.inference_mode(), watched_by(self):
                out = self.reader.decoder(input_ids=ids, past_key_values=self.cache, use_cache=True)
            self.length += len(step)
            start += len(step)
            chunk = self.geometry.sealing(self.length)
            if chunk is not None:
                self._seal(chunk)
            yield out.last_hidden_state[0]

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read tokens; the state behind the last one, [1, hidden_size]."""
        if not tokens:
            raise ValueError("there are no tokens to read")
        *_, last = self.feed(tokens)
        return last[-1:]

    def answer(self, prompt: Sequence[int], stops: Sequence[int], most: int) -> list[int]:
        """The greedy continuation behind ``prompt``, without the token that ends it."""
        said: list[int] = []
        state = self.read(prompt)
        while True:
            with torch.inference_mode():
                token = int(self.head(state)[0].argmax())
            if token in stops:
                return said
            said.append(token)
            if len(said) == most:
                return said
            state = self.read([token])

    def loss(self, tokens: Sequence[int], first: int) -> float:
        """Mean loss of ``tokens[first:]`` behind those before, nats a token."""
        targets = torch.tensor(list(tokens), device=self.reader.device)
        total, at = 0.0, 0
        for states in self.feed(tokens):
            # The state at position p tells the token at p + 1.
            begin, end = max(at, first - 1), min(at + len(states), len(tokens) - 1)
            if begin < end:
                with torch.inference_mode():
                    logits = self.head(states[begin - at : end - at]).float()
                    chosen = log_softmax(logits, dim=-1).gather(1, targets[begin + 1 : end + 1, None])
                total -= float(chosen.sum())
            at += len(states)
        return total / (len(tokens) - first)

    def _seal(self, chunk: int) -> None:
        size = self.geometry.chunk
        start = chunk * size
        if not self.dynamic and bool((self._keep == size).all()):
            return
        scores = self._scores(start)
        sink = max(0, min(size, self.config.sink - start))
        scores = comparable(scores)
        scores[..., :sink] = torch.inf
        ranks = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        if self.dynamic:
            scores[ranks < round(self.floor * size)] = torch.inf
            flat = scores.flatten()
            best = flat.argsort(descending=True, stable=True)[: round(self.config.retention * len(flat))]
            keep = torch.zeros_like(flat, dtype=torch.bool)
            keep[best] = True
            kept = keep.view_as(scores)
        else:
            kept = ranks < self._keep[..., None]
        self.kept[:, :, start : start + size] = kept

    def _scores(self, start: int) -> torch.Tensor:
        """float32 [layers, kv_heads, chunk]."""
        queries = None if self.mean_queries is None else self.mean_queries.behind(self.length)

        def scored(row: int) -> torch.Tensor:
            where = (self.reader, self.cache, self.watcher, row, start)
            query = None if queries is None else queries[row]
            return self.scorer(chunk_of(*where, self.config, self.rotary, query))

        scores = torch.stack([scored(row) for row in range(len(self.reader.kinds.full))])
        return (
            scores.mean(dim=1, keepdim=True).expand_as(scores).clone() if self.scorer.whole_layer else scores
        )
