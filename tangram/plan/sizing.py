"""How much of a card is left for conversations, and how many fit.

    pool = memory * utilisation - weights - working memory

What vLLM itself works in is only known once it has measured it; here it is estimated, on the careful side:

    working memory = 1.5 GiB                                the CUDA context and captured graphs
                   + step tokens * 2 * inner * itemsize     the widest vectors of a step
                   + 3 * requests * vocab * 4               scores of the next tokens, and their sorted copies

with vLLM's defaults by card: steps of 8,192 tokens and 1,024 requests from 70 GiB on, of 2,048 and 256 below.
With tensor parallelism the memory of the cards adds up, each works in memory of its own, and they share the
weights and the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tangram.config import TangramConfig
from tangram.errors import ConfigError
from tangram.geometry import Geometry
from tangram.plan.cards import GIB, Card
from tangram.plan.facts import ModelFacts
from tangram.predict import LENGTHS, Prediction, predict
from tangram.profile import build_geometry

UTILISATION = 0.92
"""vLLM's own default of ``--gpu-memory-utilization``."""
BASE_BYTES = 3 * GIB // 2
LARGE_CARD = 70 * GIB


def working_bytes(card: Card, facts: ModelFacts) -> int:
    """The estimate of the module's second formula."""
    tokens, requests = (8192, 1024) if card.memory_bytes >= LARGE_CARD else (2048, 256)
    vectors = tokens * 2 * facts.inner * facts.shape.itemsize
    return BASE_BYTES + vectors + 3 * requests * facts.vocab * 4


@dataclass(frozen=True)
class Budget:
    """Where a card's memory goes, or that of several which serve a model together, in bytes."""

    usable: int
    weights: int
    working: int

    @property
    def pool(self) -> int:
        """What is left for the KV cache; below 0 where the model does not fit."""
        return self.usable - self.weights - self.working


def budget(
    card: Card,
    facts: ModelFacts,
    utilisation: float = UTILISATION,
    weights: int | None = None,
    working: int | None = None,
) -> Budget:
    """The module's formulas, for as many cards as the model is served on.

    Args:
        weights, working: bytes, where they are known better: of the model, and of one card.
    """
    if not 0 < utilisation <= 1:
        raise ConfigError("--gpu-memory-utilization", f"must be above 0 and at most 1, not {utilisation}")
    cards = facts.shape.ranks
    return Budget(
        usable=cards * int(card.memory_bytes * utilisation),
        weights=facts.weight_bytes if weights is None else weights,
        working=cards * (working_bytes(card, facts) if working is None else working),
    )


def usable_bytes(geometry: Geometry, pool: int) -> int:
    """Bytes of whole pages that conversations can have of a pool: vLLM keeps one page back."""
    return max(0, pool // geometry.page_bytes - 1) * geometry.page_bytes


def longest(geometry: Geometry, pool: int, limit: int) -> int:
    """Tokens of the longest conversation that so many bytes of pool hold, at most ``limit``; 0 for none."""
    room = usable_bytes(geometry, pool)
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if geometry.bytes(middle) <= room else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Plan:
    """What fits.

    Attributes:
        prediction: at the lengths asked for, with how many conversations fit the pool.
        full: conversations of a full cache that fit, by length.
        longest: tokens of the longest single conversation, at most the model's greatest length.
    """

    pool: int
    prediction: Prediction
    full: dict[int, int]
    longest: int
    max_model_len: int

    @property
    def fits(self) -> bool:
        """Whether one conversation of the greatest length fits, without which the engine does not start."""
        return self.longest >= self.max_model_len


def make_plan(
    facts: ModelFacts,
    config: TangramConfig,
    pool: int,
    max_model_len: int | None = None,
    lengths: list[int] | None = None,
) -> Plan:
    """Work out what a pool of ``pool`` bytes holds.

    Raises:
        ConfigError, ProfileError: the settings cannot work on this model.
    """
    shape = facts.shape
    if max_model_len is not None:
        shape = replace(shape, max_model_len=max_model_len)
    geometry = build_geometry(config, shape)
    limit = shape.max_model_len
    fit = longest(geometry, pool, limit)
    shown = lengths or [*(n for n in LENGTHS if n < fit), fit or limit]
    room = usable_bytes(geometry, pool)
    prediction = predict(config, shape, lengths=shown).within(room)
    full = {n: room // geometry.full_bytes(n) for n in shown}
    return Plan(pool, prediction, full, fit, limit)


def length_that_fits(facts: ModelFacts, config: TangramConfig, pool: int, limit: int) -> int:
    """A greatest length to recommend: what fits of ``limit``, in whole thousands (of 1,024 tokens); 0 where
    not even one of these does."""
    return longest(build_geometry(config, facts.shape), pool, limit) // 1024 * 1024
