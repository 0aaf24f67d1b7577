"""A worker that runs the real scheduler's steps on tags instead of keys and values, and checks every access.

A slot of a page holds (position, hash of the whole prefix up to it). Writing, sealing and copying go exactly
where the geometry says; attending reads all that a kernel would read. A page handed out twice, a ring that is
overwritten too early, a row resumed from the wrong place, a sealed page written again, or a slot that was
never written shows at once.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.outputs import ModelRunnerOutput

from tangram.geometry import Geometry

Tag = tuple[int, int]
VOCABULARY = 50


def seed(salt: str) -> int:
    """Where a prefix hash begins: the same in every process."""
    return zlib.crc32(salt.encode())


def chain(tokens: list[int], salt: str) -> list[int]:
    """The prefix hash of each position."""
    hashes, state = [], seed(salt)
    for token in tokens:
        state = hash((state, token))
        hashes.append(state)
    return hashes


def answer(tokens: list[int], salt: str, count: int) -> list[int]:
    """What the simulated model generates greedily."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(chain(tokens, salt)[-1] % VOCABULARY)
    return tokens[len(tokens) - count :]


@dataclass
class Running:
    """A request as the worker knows it."""

    salt: str
    tokens: list[int]
    row: list[int]
    hashes: list[int] = field(default_factory=list)

    def hash_at(self, position: int) -> int:
        while len(self.hashes) <= position:
            before = self.hashes[-1] if self.hashes else seed(self.salt)
            self.hashes.append(hash((before, self.tokens[len(self.hashes)])))
        return self.hashes[position]


class SimulatedWorker:
    """Executes scheduler outputs in order.

    Args:
        room: pages that its wide steps can stage; 0 where steps must not be wide.
    """

    def __init__(self, geometry: Geometry, salts: dict[str, str], room: int = 0) -> None:
        self.g = geometry
        self.room = room
        self.wide = room > 0
        self.salts = salts
        self.memory: dict[int, list[Tag | None]] = {}
        self.requests: dict[str, Running] = {}
        self.sealed: set[int] = set()  # pages that hold kept tokens
        self.reads = 0

    def execute(self, output: Any, handed_out: set[int]) -> ModelRunnerOutput:
        """One step. ``handed_out``: pages that were free and got an owner for it; what they held is gone."""
        self.sealed -= handed_out
        for page in handed_out:
            self.memory.pop(page, None)
        for copy in output.kv_cache_block_copies or ():
            assert copy.dst_block_id not in self.sealed, "a copy overwrites a sealed page"
            self.memory[copy.dst_block_id] = list(self.memory[copy.src_block_id])
        self.update(output)
        self.check_staged(output)
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            request, start = self.requests[name], self.computed[name]
            assert len(request.row) == self.g.pages(start + count), (
                "the row is not as long as the formula says"
            )
            for part in self.parts(start, start + count):
                self.seal(request, part.start)
                self.write(request, part.start, part.stop)
                self.attend(request, part.stop)
            new = []
            if start + count == len(request.tokens):
                new = [request.hash_at(start + count - 1) % VOCABULARY]
                request.tokens += new
            sampled.append(new)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled_token_ids=sampled
        )

    def update(self, output: Any) -> None:
        self.computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self.requests[new.req_id] = Running(self.salts[new.req_id], tokens, list(new.block_ids[0]))
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, pages, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            request = self.requests[name]
            fresh = list(pages[0]) if pages else []
            if name in cached.resumed_req_ids:
                known = cached.all_token_ids[name]
                request.tokens, request.row, request.hashes = list(known), fresh, []
            else:
                request.row += fresh
            self.computed[name] = computed

    def check_staged(self, output: Any) -> None:
        """The raw tokens of all requests that cross a boundary fit the buffer."""
        staged = 0
        for name, count in output.num_scheduled_tokens.items():
            start, end = self.computed[name], self.computed[name] + count
            if len(self.parts(start, end)) > 1:
                staged += -(-(end - self.g.sealed(start) * self.g.chunk) // self.g.page_tokens)
        assert staged <= self.room, "a wide step stages more than there is room for"

    def parts(self, start: int, end: int) -> list[range]:
        """A step's tokens between the seal boundaries that it crosses, if it may."""
        cuts = [length for length in range(start + 1, end) if self.g.sealing(length) is not None]
        assert self.wide or not cuts, "a step crosses a seal boundary"
        return [range(a, b) for a, b in pairwise([start, *cuts, end])]

    def write(self, request: Running, start: int, end: int) -> None:
        size = self.g.page_tokens
        for position in range(start, end):
            tag = (position, request.hash_at(position))
            for tier in range(self.g.num_tiers):
                page = request.row[self.g.ring_index(position, tier)]
                assert page not in self.sealed, "a raw token is written to a sealed page"
                self.memory.setdefault(page, [None] * size)[position % size] = tag

    def seal(self, request: Running, computed: int) -> None:
        chunk = self.g.sealing(computed)
        if chunk is None:
            return
        size = self.g.page_tokens
        written: set[int] = set()
        for tier in range(self.g.num_tiers):
            for j, position in enumerate(self.kept(request, chunk, tier)):
                tag = self.raw(request, position, tier)
                page = request.row[self.g.sealed_index(chunk, tier, j)]
                assert page not in self.sealed, "a page is sealed twice"
                if j % size == 0:
                    self.memory[page] = [None] * size
                    written.add(page)
                self.memory[page][j % size] = tag
        self.sealed |= written

    def kept(self, request: Running, chunk: int, tier: int) -> list[int]:
        """Chosen by the chunk's own tokens, as a scorer does."""
        span = range(chunk * self.g.chunk, (chunk + 1) * self.g.chunk)
        ranked = sorted(span, key=lambda position: hash((request.hash_at(position), tier)))
        return sorted(ranked[: self.g.keep[tier]])

    def raw(self, request: Running, position: int, tier: int) -> Tag:
        page = request.row[self.g.ring_index(position, tier)]
        tag = self.memory[page][position % self.g.page_tokens]
        assert tag == (position, request.hash_at(position)), "a raw slot holds something else"
        self.reads += 1
        return tag

    def attend(self, request: Running, end: int) -> None:
        """Read all that the last token of a part sees. It sees no less than the tokens before it, as a part
        crosses no boundary."""
        sealed = self.g.sealed(end - 1)
        for tier in range(self.g.num_tiers):
            for chunk in range(sealed):
                for j, position in enumerate(self.kept(request, chunk, tier)):
                    page = request.row[self.g.sealed_index(chunk, tier, j)]
                    tag = self.memory[page][j % self.g.page_tokens]
                    assert tag == (position, request.hash_at(position)), "a sealed slot holds something else"
                    self.reads += 1
            for position in range(sealed * self.g.chunk, end):
                self.raw(request, position, tier)
