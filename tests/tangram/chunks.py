"""Random chunks for the scorers' tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tangram.rotary import Rotary
from tangram.scorers import Chunk


def random_chunk(
    seed: int,
    heads: int = 2,
    group: int = 2,
    tokens: int = 9,
    window: int = 5,
    width: int = 3,
    size: int = 8,
    number: int = 1,
    sink: int = 0,
    rotary: Rotary | None = None,
) -> Chunk:
    """Chunk ``number`` of some sequence, everything in it random; queries are those of the last ``width``
    tokens of the ``window`` tokens behind it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    first = number * tokens
    boundary = first + tokens + window
    return Chunk(
        layers=torch.randint(0, 3, (heads,), generator=generator),
        heads=torch.arange(heads),
        keys=draw(heads, tokens, size),
        sink=sink,
        values=draw(heads, tokens, size),
        positions=torch.arange(first, first + tokens),
        recent=draw(heads, window, size),
        queries=draw(heads, group, width, size),
        query_positions=torch.arange(boundary - width, boundary),
        scale=torch.rand(heads, generator=generator) + 0.1,
        rotary=rotary,
        mean_query=draw(heads, size),
    )


@st.composite
def chunks(draw: st.DrawFn, rotary: bool = False) -> Chunk:
    """Chunks of any small shape."""
    size = 2 * draw(st.integers(1, 5))
    window = draw(st.integers(1, 6))
    turns = None
    if rotary:
        pairs = draw(st.integers(1, size // 2))
        numbers = st.lists(st.floats(0, 2, width=32), min_size=3 * pairs, max_size=3 * pairs)
        turns = Rotary(torch.tensor(draw(numbers)).view(3, pairs), draw(st.booleans()))
    return random_chunk(
        draw(st.integers(0, 10**6)),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        tokens=draw(st.integers(2, 12)),
        window=window,
        width=draw(st.integers(1, window)),
        size=size,
        number=draw(st.integers(0, 3)),
        sink=draw(st.integers(0, 1)),
        rotary=turns,
    )
