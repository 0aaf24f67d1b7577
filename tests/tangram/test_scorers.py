"""Each scorer against its formula, written out number by number in double precision."""

from __future__ import annotations

import cmath
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tangram.config import SCORERS
from tangram.errors import CacheIntegrityError
from tangram.rotary import FUTURE, Rotary
from tangram.scorers import Chunk, Need, get_scorer
from tests.tangram.chunks import chunks, random_chunk

Vector = Sequence[float]
PARTS = {
    Need.VALUES: ("values",),
    Need.RECENT: ("recent",),
    Need.QUERIES: ("queries", "query_positions", "scale"),
    Need.POSITIONS: ("positions",),
    Need.ROTARY: ("rotary",),
    Need.MEAN_QUERY: ("mean_query",),
}


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a: Vector) -> float:
    return math.sqrt(dot(a, a))


def softmax(logits: Vector) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def plain_keydiff(c: Chunk, head: int) -> list[float]:
    keys = c.keys[head].tolist()
    units = [[x / norm(key) for x in key] for key in keys]
    anchor = [sum(column) / len(keys) for column in zip(*units, strict=True)]
    assume(norm(anchor) > 0.05)  # where keys cancel, so do their digits
    return [-dot(anchor, unit) / norm(anchor) for unit in units]


def plain_knorm(c: Chunk, head: int) -> list[float]:
    return [-norm(key) for key in c.keys[head].tolist()]


def plain_attention(c: Chunk, head: int, member: int, query: int) -> list[float]:
    """One query's weights over the chunk and what is behind it, up to the query's own position."""
    keys = c.keys[head].tolist() + c.recent[head].tolist()
    first, own = int(c.positions[0]), int(c.query_positions[query])
    asked = c.queries[head, member, query].tolist()
    weights = softmax([dot(key, asked) * float(c.scale[head]) for key in keys[: own - first + 1]])
    return weights + [0.0] * (len(keys) - len(weights))


def plain_snapkv(c: Chunk, head: int) -> list[float]:
    group, width = c.queries.shape[1:3]
    each = [plain_attention(c, head, m, q) for m in range(group) for q in range(width)]
    mean = [sum(column) / len(each) for column in zip(*each, strict=True)]
    mean = [0.0, 0.0, *mean[: len(mean) - width], 0.0, 0.0]
    return [sum(mean[t : t + 5]) / 5 for t in range(c.keys.shape[1])]


def plain_tova(c: Chunk, head: int) -> list[float]:
    group, width = c.queries.shape[1:3]
    each = [plain_attention(c, head, m, width - 1) for m in range(group)]
    return [sum(column) / group for column in zip(*each, strict=True)][: c.keys.shape[1]]


def plain_streamingllm(c: Chunk, head: int) -> list[float]:
    return [float(t) for t in range(c.keys.shape[1])]


def turned(vector: Vector, rotary: Rotary | None, layer: int, position: float) -> list[float]:
    """A vector, each rotated pair of it seen as a complex number and multiplied by exp(i angle)."""
    out = list(vector)
    if rotary is None:
        return out
    frequencies = rotary.frequencies[layer].tolist()
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + len(frequencies))
        z = complex(vector[a], vector[b]) * cmath.exp(1j * frequency * position)
        out[a], out[b] = z.real, z.imag
    return out


def plain_expected_attention(c: Chunk, head: int) -> list[float]:
    layer, scale = int(c.layers[head]), float(c.scale[head])
    keys = c.keys[head].tolist() + c.recent[head].tolist()
    at, size = c.query_positions.tolist(), c.keys.shape[2]
    # The mean rotation as a matrix: its columns are the means of the rotated unit vectors.
    columns = []
    for i in range(size):
        unit = [float(i == j) for j in range(size)]
        ahead = [turned(unit, c.rotary, layer, at[-1] + 1 + f) for f in range(FUTURE)]
        columns.append([sum(x) / FUTURE for x in zip(*ahead, strict=True)])
    total = [0.0] * len(keys)
    for queries in c.queries[head].tolist():
        plain = [turned(q, c.rotary, layer, -p) for q, p in zip(queries, at, strict=True)]
        mean = [sum(x) / len(plain) for x in zip(*plain, strict=True)]
        logits = []
        for key in keys:
            back = [dot(column, key) for column in columns]  # k.(R m) = (R'k).m and k.(R S R')k likewise
            spread = sum(dot(back, [a - b for a, b in zip(q, mean, strict=True)]) ** 2 for q in plain)
            logits.append(dot(back, mean) * scale + spread / len(plain) * scale**2 / 2)
        for t, weight in enumerate(softmax(logits[c.sink :])):
            total[c.sink + t] += weight / c.queries.shape[1]
    return [w * norm(v) for w, v in zip(total, c.values[head].tolist(), strict=False)]


PLAIN: dict[str, Callable[[Chunk, int], list[float]]] = {
    "keydiff": plain_keydiff,
    "knorm": plain_knorm,
    "snapkv": plain_snapkv,
    "tova": plain_tova,
    "streamingllm": plain_streamingllm,
}


def check(name: str, chunk: Chunk, plain: Callable[[Chunk, int], list[float]]) -> None:
    scores = get_scorer(name)(chunk)
    assert scores.dtype == torch.float32
    expected = torch.tensor([plain(chunk, head) for head in range(len(chunk.heads))])
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=40)
@given(chunk=chunks())
def test_the_score_is_its_formula(name: str, chunk: Chunk) -> None:
    check(name, chunk, PLAIN[name])


@pytest.mark.parametrize("name", ["keyvalue", "keyvalue_query"])
@settings(max_examples=40)
@given(chunk=chunks(), sink=st.integers(0, 3), again=st.booleans())
def test_places_in_several_orders_are_added_up(name: str, chunk: Chunk, sink: int, again: bool) -> None:
    """Of the very numbers that it orders; those of KeyDiff are tested above. Also where values are alike."""
    values = chunk.values.round() if again and chunk.values is not None else chunk.values
    chunk = dataclasses.replace(chunk, sink=min(sink, chunk.keys.shape[1]), values=values)
    found = get_scorer(name)(chunk)
    each = [get_scorer("keydiff")(chunk), chunk.values.norm(dim=-1)]
    if name == "keyvalue_query":
        products = torch.einsum("hcd,hd->hc", chunk.keys, chunk.mean_query)
        assume(products.sort(dim=-1).values.diff(dim=-1).min() > 1e-5)  # not the order of rounding errors
        each.append(products)
    orders = torch.stack(each)
    orders[..., : chunk.sink] = math.inf
    for head, tokens in enumerate(found.tolist()):
        both = orders[:, head].tolist()
        assert tokens == [sum(sum(x < one[t] for x in one) for one in both) for t in range(len(tokens))]


@settings(max_examples=15)
@given(chunk=chunks(rotary=True))
def test_expected_attention_is_its_formula(chunk: Chunk) -> None:
    check("expected_attention", chunk, plain_expected_attention)


def test_without_a_rotation_expected_attention_takes_the_queries_as_they_are() -> None:
    chunk = random_chunk(5)
    check("expected_attention", chunk, plain_expected_attention)
    still = dataclasses.replace(chunk, rotary=Rotary(torch.zeros(3, 4)))
    score = get_scorer("expected_attention")
    torch.testing.assert_close(score(still), score(chunk))


@pytest.mark.parametrize("name", SCORERS)
def test_a_head_s_scores_do_not_depend_on_the_heads_beside_it(name: str) -> None:
    rotary = Rotary(torch.rand(3, 3, generator=torch.Generator().manual_seed(0)))
    chunk = random_chunk(7, heads=5, group=3, sink=2, rotary=rotary)
    together = get_scorer(name)(chunk)
    per_head = ("layers", "heads", "keys", "values", "recent", "queries", "scale", "mean_query")
    for head in range(5):
        one = {field: getattr(chunk, field)[head : head + 1] for field in per_head}
        alone = get_scorer(name)(dataclasses.replace(chunk, **one))
        torch.testing.assert_close(alone, together[head : head + 1])


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_gets_by_with_what_it_declares_and_no_less(name: str) -> None:
    scorer = get_scorer(name)
    chunk = random_chunk(3, rotary=Rotary(torch.ones(3, 2)))
    expected = scorer(chunk)
    unneeded: dict[str, Any] = {
        field: None for need, parts in PARTS.items() if need not in scorer.needs for field in parts
    }
    assert torch.equal(scorer(dataclasses.replace(chunk, **unneeded)), expected)
    for need in scorer.needs - {Need.ROTARY}:  # a model may have no rotation
        with pytest.raises(CacheIntegrityError, match="without"):
            scorer(dataclasses.replace(chunk, **dict.fromkeys(PARTS[need])))


def test_random_is_a_fixed_spread_of_layer_head_and_position() -> None:
    def scores(layer: int, heads: int, first: int, tokens: int) -> torch.Tensor:
        chunk = Chunk(
            layers=torch.full((heads,), layer),
            heads=torch.arange(heads),
            keys=torch.zeros(heads, tokens, 2),
            positions=torch.arange(first, first + tokens),
        )
        return get_scorer("random")(chunk)

    whole = scores(3, 4, 0, 4096)
    torch.random.manual_seed(1)
    assert torch.equal(scores(3, 4, 1000, 500), whole[:, 1000:1500]), (
        "only the position counts, not the chunk"
    )
    assert 0 <= whole.min() < whole.max() < 1
    # Spread like independent draws: mean and variance, along a head and between heads, layers, neighbours.
    assert whole.mean().item() == pytest.approx(0.5, abs=0.02)
    assert whole.var().item() == pytest.approx(1 / 12, abs=0.005)
    series = [*whole, scores(4, 1, 0, 4096)[0], whole[0].roll(1), scores(3, 1, 2**31, 4096)[0]]
    correlation = torch.corrcoef(torch.stack(series)) - torch.eye(len(series))
    assert correlation.abs().max() < 0.08
    assert len(set(whole[0].tolist())) > 4080


@given(st.integers(0, 10**6))
def test_scores_of_long_conversations_stay_exact(first: int) -> None:
    """Positions far beyond what float32 tells apart."""
    positions = torch.arange(2**40 + first, 2**40 + first + 8)
    chunk = Chunk(torch.zeros(1), torch.zeros(1), torch.zeros(1, 8, 2), positions=positions)
    assert get_scorer("streamingllm")(chunk).tolist() == [[float(t) for t in range(8)]]
