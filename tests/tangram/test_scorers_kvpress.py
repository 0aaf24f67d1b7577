"""Our rankings against kvpress, where it has the same method: same keys in, same ranking out.

kvpress pins versions of its requirements that this project cannot have (docs/scorers.md), so the lock has it
without them: only the modules with the methods are loaded, which need torch and transformers alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tangram.rotary import Rotary
from tangram.scorers import Chunk, get_scorer
from tests.tangram.chunks import random_chunk

SINK, TOKENS, WINDOW, SIZE, GROUP = 4, 96, 24, 16, 3


@pytest.fixture(scope="module")
def presses() -> Iterator[Any]:
    """``presses("snapkv", "SnapKVPress")`` gives the class. The package's root is stood in for: it would load
    every method and what they need, and change transformers' attention."""
    found = importlib.machinery.PathFinder.find_spec("kvpress")
    assert found is not None, "kvpress is in requirements.lock: make setup"
    assert found.origin is not None
    before = {name for name in sys.modules if name.partition(".")[0] == "kvpress"}
    if "kvpress" not in before:
        root = ModuleType("kvpress")
        root.__path__ = [str(Path(found.origin).parent)]
        sys.modules["kvpress"] = root
    yield lambda module, name: getattr(importlib.import_module(f"kvpress.presses.{module}_press"), name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
        if name not in before:
            del sys.modules[name]


def chunk_of(seed: int, width: int, heads: int = 2, rotary: Rotary | None = None) -> Chunk:
    """The first chunk of a sequence, with the scale that kvpress takes."""
    chunk = random_chunk(seed, heads, GROUP, TOKENS, WINDOW, width, SIZE, number=0, sink=SINK, rotary=rotary)
    scale = torch.full((heads,), SIZE**-0.5)
    return dataclasses.replace(chunk, scale=scale, layers=torch.zeros(heads, dtype=torch.int64))


def keys_of(chunk: Chunk) -> torch.Tensor:
    """[1, heads, tokens + window, D]."""
    return torch.cat([chunk.keys, chunk.recent], dim=1)[None]


def attention_module(chunk: Chunk, rotary: Any = None) -> tuple[Any, torch.Tensor]:
    """A layer whose projection is the identity, and the hidden states that make it yield our queries."""
    heads, group, width, size = chunk.queries.shape
    config = SimpleNamespace(num_attention_heads=heads * group, num_key_value_heads=heads)
    module = SimpleNamespace(config=config, head_dim=size, q_proj=torch.nn.Identity(), rotary_emb=rotary)
    hidden = chunk.queries.permute(2, 0, 1, 3).reshape(1, width, heads * group * size)
    # Before the last queries come others, of which there must be as many as kvpress leaves out.
    return module, torch.cat([torch.full((1, SINK, hidden.shape[2]), 1e3), hidden], dim=1)


def unrotated(width: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Position embeddings that leave queries as they are: ours are rotated already."""
    return {"position_embeddings": (torch.ones(1, SINK + width, SIZE), torch.zeros(1, SINK + width, SIZE))}


def score(press: Any, chunk: Chunk, width: int = 1) -> torch.Tensor:
    """kvpress's scores of the chunk's tokens, [heads, tokens]."""
    module, hidden = attention_module(chunk)
    keys = keys_of(chunk)
    scores: torch.Tensor = press.score(module, hidden, keys, keys, None, unrotated(width))
    return scores[0, :, :TOKENS]


def same_ranking(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Behind the sink tokens, which both keep whatever they score."""
    torch.testing.assert_close(ours[:, SINK:], theirs[:, SINK:], atol=1e-6, rtol=1e-5)
    for mine, other in zip(ours[:, SINK:], theirs[:, SINK:], strict=True):
        assert mine.argsort(descending=True, stable=True).tolist() == (
            other.argsort(descending=True, stable=True).tolist()
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "module", "name"), [("knorm", "knorm", "KnormPress"), ("keydiff", "keydiff", "KeyDiffPress")]
)
def test_keys_only(presses: Any, ours: str, module: str, name: str, seed: int) -> None:
    chunk = dataclasses.replace(chunk_of(seed, 1), recent=torch.empty(2, 0, SIZE))
    same_ranking(get_scorer(ours)(chunk), score(presses(module, name)(), chunk))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [8, WINDOW])
def test_snapkv(presses: Any, seed: int, width: int) -> None:
    chunk = chunk_of(seed, width)
    theirs = score(presses("snapkv", "SnapKVPress")(window_size=width), chunk, width)
    same_ranking(get_scorer("snapkv")(chunk), theirs)


@pytest.mark.parametrize("seed", range(3))
def test_tova(presses: Any, seed: int) -> None:
    """The mean over the layer's heads, as the sealing takes it."""
    chunk = chunk_of(seed, 8)
    ours = get_scorer("tova")(chunk).mean(dim=0, keepdim=True).expand(2, -1)
    same_ranking(ours, score(presses("tova", "TOVAPress")(), chunk, 8))


@pytest.mark.parametrize("kept", [8, 32, 95])
def test_streamingllm_keeps_the_same(presses: Any, kept: int) -> None:
    chunk = dataclasses.replace(chunk_of(0, 1), recent=torch.empty(2, 0, SIZE))
    # kvpress counts in ratios, and rounds down what it keeps.
    press = presses("streaming_llm", "StreamingLLMPress")(
        compression_ratio=1 - (kept + 0.5) / TOKENS, n_sink=SINK
    )
    theirs = {int(t) for t in score(press, chunk)[0].topk(kept).indices}
    ours = get_scorer("streamingllm")(chunk)[0]
    ours[:SINK] = torch.inf
    assert {int(t) for t in ours.topk(kept).indices} == theirs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [8, WINDOW])
def test_expected_attention(presses: Any, seed: int, width: int) -> None:
    """Ours gets rotated queries, kvpress the same before their rotation; both look ahead from one place."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
    rotary = Rotary(frequencies[None])
    chunk = chunk_of(seed, width, rotary=rotary)

    def theirs_rotary(_: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.cat([positions[..., None] * frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()

    module, hidden = attention_module(chunk, theirs_rotary)
    values = torch.cat([chunk.values, torch.ones(2, WINDOW, SIZE)], dim=1)[None]
    press = presses("expected_attention", "ExpectedAttentionPress")(n_sink=SINK)
    theirs = press.score(module, hidden, keys_of(chunk), values, None, {})[0, :, :TOKENS]
    at = torch.arange(SINK, SINK + width)  # where kvpress takes these queries to be
    queries = rotary.turn(chunk.queries, *rotary.phases(at, chunk.layers))
    ours = get_scorer("expected_attention")(dataclasses.replace(chunk, queries=queries, query_positions=at))
    same_ranking(ours, theirs)


def test_random_exists_there_too(presses: Any) -> None:
    chunk = chunk_of(0, 1)
    assert score(presses("random", "RandomPress")(seed=0), chunk).shape == get_scorer("random")(chunk).shape
