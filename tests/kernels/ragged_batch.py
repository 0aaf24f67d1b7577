"""A batch of requests built and answered the slow way, from the written rules alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels import RaggedLayout


@dataclass
class Sizes:
    """The numbers of a test case; the ring is the smallest that holds chunk and window, plus the spare
    slots."""

    page: int = 16
    chunk: int = 64
    window: int = 32
    keep: tuple[int, ...] = (32, 16)
    head_size: int = 64
    kv_heads: int = 3
    group: int = 3
    dtype: torch.dtype = torch.bfloat16
    members: int = 4
    spare_slots: int = 2
    page_padding: int = 0
    sinks: tuple[float, ...] | None = None
    soft_cap: float = 0.0
    ring: int = field(init=False)

    def __post_init__(self) -> None:
        self.ring = -(-(self.chunk + self.window) // self.page) + self.spare_slots

    @property
    def layout(self) -> RaggedLayout:
        """The object under test; nothing in this module computes with it."""
        return RaggedLayout(self.page, self.ring, self.chunk, self.window, self.keep, self.head_size)


class Batch:
    """Requests in a poisoned pool, with each token's key and value remembered outside it.

    ``lengths`` are the sequence lengths after the step, ``steps`` the new tokens of the step. All tokens
    before the step are written into the pool where the rules put them, every other element of the pool is
    NaN. A step must end at or before the next seal boundary.
    """

    def __init__(self, sizes: Sizes, lengths: list[int], steps: list[int], seed: int = 0) -> None:
        self.sizes = s = sizes
        self.lengths, self.steps = lengths, steps
        random = torch.Generator().manual_seed(seed)
        tiers = len(s.keep)
        per_chunk = sum(kept // s.page for kept in s.keep)
        self.sealed = [max(0, n - q - s.window) // s.chunk for n, q in zip(lengths, steps, strict=True)]
        width = s.ring * tiers + max([0, *self.sealed]) * per_chunk + 3
        pages = width * len(lengths) + 7
        order = torch.randperm(pages, generator=random).to(torch.int32)
        self.rows = order[: width * len(lengths)].reshape(len(lengths), width).contiguous()
        page_elements = s.members * s.page * 2 * s.head_size
        storage = torch.full((pages, page_elements + s.page_padding), float("nan"), dtype=s.dtype)
        self.pool = storage[:, :page_elements].unflatten(1, (s.members, s.page, 2 * s.head_size))
        self.tier = torch.randint(tiers, (s.kv_heads,), generator=random, dtype=torch.int32)
        self.member = _members(self.tier, s.members, random)
        self.keys = [_normal((n, s.kv_heads, s.head_size), random, s.dtype) for n in lengths]
        self.values = [_normal((n, s.kv_heads, s.head_size), random, s.dtype) for n in lengths]
        heads = s.kv_heads * s.group
        self.queries = [_normal((n, heads, s.head_size), random, s.dtype) for n in lengths]
        self.kept = [self._choose(sealed, random) for sealed in self.sealed]
        for request, n in enumerate(lengths):
            self._write_history(request, n - steps[request])

    def _choose(self, sealed: int, random: torch.Generator) -> list[list[list[int]]]:
        """For each head and sealed chunk the kept positions, in the order in which they lie in the pages."""
        s = self.sizes
        return [
            [
                sorted(
                    torch.randperm(s.chunk, generator=random)[: s.keep[tier]].add(chunk * s.chunk).tolist()
                )
                for chunk in range(sealed)
            ]
            for tier in self.tier.tolist()
        ]

    def _write_history(self, request: int, cached: int) -> None:
        for head in range(self.sizes.kv_heads):
            for chunk, positions in enumerate(self.kept[request][head]):
                for index, position in enumerate(positions):
                    self._slot_kept(request, head, chunk, index).copy_(self._both(request, head, position))
            for position in range(self.sealed[request] * self.sizes.chunk, cached):
                self.slot_raw(request, head, position).copy_(self._both(request, head, position))

    def _both(self, request: int, head: int, position: int) -> torch.Tensor:
        return torch.cat((self.keys[request][position, head], self.values[request][position, head]))

    def slot_raw(self, request: int, head: int, position: int) -> torch.Tensor:
        """The ``2 * D`` elements of the pool in which a raw token of a head must lie."""
        s, tier = self.sizes, int(self.tier[head])
        page = self.rows[request, ((position // s.page) % s.ring) * len(s.keep) + tier]
        return self.pool[int(page), int(self.member[head]), position % s.page]

    def _slot_kept(self, request: int, head: int, chunk: int, index: int) -> torch.Tensor:
        s, tier = self.sizes, int(self.tier[head])
        entry = s.ring * len(s.keep)
        for _ in range(chunk):
            entry += sum(s.keep) // s.page
        for before in range(tier):
            entry += s.keep[before] // s.page
        page = self.rows[request, entry + index // s.page]
        return self.pool[int(page), int(self.member[head]), index % s.page]

    def step(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The step's tokens of all requests, flattened: ``[T, heads, D]``."""
        return torch.cat([part[n - q :] for part, n, q in zip(parts, self.lengths, self.steps, strict=True)])

    def expected(self) -> torch.Tensor:
        """The step's attention output in float64, ``[T, Hq, D]``."""
        s = self.sizes
        out = torch.empty(sum(self.steps), s.kv_heads * s.group, s.head_size, dtype=torch.float64)
        at = 0
        for request, (n, count) in enumerate(zip(self.lengths, self.steps, strict=True)):
            asking = torch.arange(n - count, n)
            for head in range(s.kv_heads):
                kept = [position for chunk in self.kept[request][head] for position in chunk]
                seen = torch.tensor(kept + list(range(self.sealed[request] * s.chunk, n)), dtype=torch.long)
                keys, values = (parts[request][seen, head].double() for parts in (self.keys, self.values))
                hidden = seen[None, :] > asking[:, None]
                for query in range(head * s.group, (head + 1) * s.group):
                    scores = self.queries[request][asking, query].double() @ keys.T * self.scale
                    if s.soft_cap:
                        scores = torch.tanh(scores / s.soft_cap) * s.soft_cap
                    scores[hidden] = float("-inf")
                    if s.sinks is not None:  # takes its share of the weight, and has no value
                        sink = torch.full((count, 1), s.sinks[query], dtype=torch.float64)
                        scores = torch.cat((scores, sink), dim=-1)
                    out[at : at + count, query] = scores.softmax(-1)[:, : len(seen)] @ values
            at += count
        return out

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What both operators take after the pool, up to the layout."""
        return self.rows, self.query_start_loc, self.seq_lens, self.tier, self.member

    @property
    def scoring(self) -> dict[str, torch.Tensor | float | None]:
        """What attention takes after the scale."""
        sinks = None if self.sizes.sinks is None else torch.tensor(self.sizes.sinks)
        return {"sinks": sinks, "soft_cap": self.sizes.soft_cap}

    @property
    def scale(self) -> float:
        return self.sizes.head_size**-0.5

    @property
    def query_start_loc(self) -> torch.Tensor:
        return torch.tensor([0, *self.steps]).cumsum(0).to(torch.int32)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)


def _normal(shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(dtype)


def _members(tier: torch.Tensor, members: int, random: torch.Generator) -> torch.Tensor:
    """Distinct members for the heads of one tier, in random order; there are enough for all heads in one
    tier."""
    chosen = torch.zeros_like(tier)
    for value in set(tier.tolist()):
        heads = (tier == value).nonzero()[:, 0]
        chosen[heads] = torch.randperm(members, generator=random)[: len(heads)].to(torch.int32)
    return chosen
