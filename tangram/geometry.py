"""All page arithmetic of the ragged cache. Nothing else in the project computes an offset.

A *page* holds ``B`` tokens of ``G`` heads. Heads (layer, KV head) of similar budget form a *tier*
of at most ``G`` heads; there are ``K`` tiers. A chunk is ``C`` tokens, the window ``W`` tokens.
Chunk ``k`` is sealed once ``n >= (k + 1) * C + W`` tokens are in the cache: tier ``t`` then keeps
``keep[t]`` of its ``C`` tokens, which fill ``keep[t] / B`` pages; ``S`` is the sum over tiers.
Everything later is the raw tail, at most ``C + W`` tokens, kept for all heads in a ring of ``R``
slots. ``rewind`` extra tokens of ring let a request resume that far before its end.

A request holds one append-only row of page ids::

    [ ring: R slots x K tiers ][ chunk 0: S pages ][ chunk 1: S pages ] ...
      slot 0: t0 t1 .. tK-1      t0 t0 t1 t2 t2 ..
      slot 1: t0 t1 .. tK-1

    raw token p of tier t              row[((p // B) % R) * K + t]               offset p % B
    kept token j of chunk k of tier t  row[R * K + k * S + prefix[t] + j // B]   offset j % B

    R        = ceil((C + W + rewind) / B) + 1
    sealed(n) = max(0, n - W) // C
    pages(n) = ceil(n / B) * K              while nothing is sealed (the ring grows)
               R * K + sealed(n) * S        afterwards (the first seal completes the ring)

While nobody uses the row, it has holes: of the ring only those slots are held that one of the lengths needs
at which the sequence may be resumed, ``resumable(n)``, and no chunk that the greatest of them leaves raw.
Whoever resumes it fills the holes with fresh pages::

    raw_start(m)  = sealed(m - 1) * C            resuming at m needs positions raw_start(m) .. m - 1 raw
    idle_pages(n) = K * (slots of positions raw_start(m) .. m - 1, for all m of resumable(n))
                    + sealed(max(resumable(n)) - 1) * S

Inside a page the heads of a tier lie side by side: ``pool[page, member, B, 2 * head_size]``, keys
in the first half of the last axis and values in the second.

In a model that also has sliding-window layers, ``layers`` counts the others only. vLLM keeps the window
layers' cache in blocks of the same pool, as many layers side by side as fit into a page of ours: so a page
must hold at least one such layer's block, ``window_block_bytes``.

With tensor parallelism the KV heads of every layer are shared out to ``ranks``: rank ``r`` has those from
``r * kv_heads / ranks`` on. Every rank has the same rows, tiers and pages, and in its pool the part of a page
that its own heads of the tier fill: an equal part, as each tier has equally many heads of each rank. A
``Geometry`` describes all ranks together, and so do its sizes in bytes; ``of_rank`` gives what one of them
sees, which is an ordinary geometry of its heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from tangram.errors import ConfigError

Head = tuple[int, int]
"""(layer, KV head)."""

WINDOW_FIELDS = ("window_block_bytes", "window_layers", "window_block_tokens", "window_span")
"""What is 0 in a model without sliding-window layers."""
POSITIVE_FIELDS = (
    "layers",
    "kv_heads",
    "head_size",
    "itemsize",
    "page_tokens",
    "chunk",
    "group_size",
    "ranks",
)


def rank_of(head: Head, kv_heads: int, ranks: int) -> int:
    """The rank that has a head, of ``kv_heads`` in a layer."""
    return head[1] // (kv_heads // ranks)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``."""
    return -(-a // b)


def that_fit(pool: int, running: int, idle: int) -> int:
    """How many conversations of one length a pool holds, one of them being answered and the others idle.

    Args:
        pool, running, idle: bytes, or pages; ``idle`` is 0 of one too short to be resumed, which counts as
            running.
    """
    return max(0, (pool - running) // (idle or running) + 1)


@dataclass(frozen=True)
class Tier:
    """Heads that share page tables.

    Attributes:
        keep: tokens of a sealed chunk that each head of the tier keeps; a multiple of the page.
        heads: the members, in the order in which they lie inside a page; those of the first rank first.
    """

    keep: int
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class Geometry:
    """The cache of one model under one configuration, as arithmetic.

    Attributes:
        layers, kv_heads, head_size: the model's shape (KV heads of a layer, elements of a head).
        itemsize: bytes of a cache element.
        page_tokens, chunk, window, rewind: tokens; see the module's picture.
        group_size: head slots of a page, over all ranks.
        tiers: every head of the model exactly once.
        window_block_bytes: bytes of one sliding-window layer's block; 0 where there is no such layer.
        window_layers: how many there are.
        window_block_tokens, window_span: tokens of such a block, and tokens that such a layer sees.
        ranks: of tensor parallelism.
    """

    layers: int
    kv_heads: int
    head_size: int
    itemsize: int
    page_tokens: int
    chunk: int
    window: int
    rewind: int
    group_size: int
    tiers: tuple[Tier, ...]
    window_block_bytes: int = 0
    window_layers: int = 0
    window_block_tokens: int = 0
    window_span: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        for name in ("kv_heads", "group_size", "window_block_bytes"):
            if getattr(self, name) % self.ranks:
                raise ConfigError(
                    name, f"must be a multiple of {self.ranks} ranks, not {getattr(self, name)}"
                )
        for name in ("window", "rewind", *WINDOW_FIELDS):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must not be negative, not {getattr(self, name)}")
        if self.chunk % self.page_tokens:
            raise ConfigError(
                "chunk", f"must be a multiple of page_tokens ({self.page_tokens}), not {self.chunk}"
            )
        self._check_tiers()

    def _check_tiers(self) -> None:
        seen: set[Head] = set()
        for index, tier in enumerate(self.tiers):
            if not self.page_tokens <= tier.keep <= self.chunk or tier.keep % self.page_tokens:
                raise ConfigError(
                    "tiers",
                    f"tier {index} keeps {tier.keep} tokens a chunk: must be a multiple of "
                    f"{self.page_tokens} from {self.page_tokens} to {self.chunk}",
                )
            if not 1 <= len(tier.heads) <= self.group_size:
                raise ConfigError(
                    "tiers", f"tier {index} has {len(tier.heads)} heads, a page holds {self.group_size}"
                )
            shares = {len(share) for share in self._by_rank(tier)}
            if len(shares) > 1:
                raise ConfigError("tiers", f"tier {index} must have equally many heads of each rank")
            seen.update(tier.heads)
        every = {(layer, head) for layer in range(self.layers) for head in range(self.kv_heads)}
        if seen != every or sum(len(tier.heads) for tier in self.tiers) != len(every):
            raise ConfigError("tiers", f"must name each of the model's {len(every)} heads exactly once")

    # ---- ranks -------------------------------------------------------------------------------

    @property
    def rank_heads(self) -> int:
        """KV heads of a layer that one rank has."""
        return self.kv_heads // self.ranks

    def _by_rank(self, tier: Tier) -> list[list[Head]]:
        """A tier's heads, by rank."""
        shares: list[list[Head]] = [[] for _ in range(self.ranks)]
        for head in tier.heads:
            if 0 <= head[1] < self.kv_heads:  # others are refused by their names
                shares[rank_of(head, self.kv_heads, self.ranks)].append(head)
        return shares

    def of_rank(self, rank: int) -> Geometry:
        """What one rank has: its heads, numbered from 0 in each layer, in the same rows, tiers and pages."""
        first = rank * self.rank_heads
        return replace(
            self,
            kv_heads=self.rank_heads,
            group_size=self.group_size // self.ranks,
            tiers=tuple(
                Tier(tier.keep, tuple((layer, head - first) for layer, head in self._by_rank(tier)[rank]))
                for tier in self.tiers
            ),
            window_block_bytes=self.window_block_bytes // self.ranks,
            ranks=1,
        )

    # ---- counts ------------------------------------------------------------------------------

    @cached_property
    def ring_slots(self) -> int:
        """R: pages of a tier that the raw tail cycles through."""
        return ceil_div(self.chunk + self.window + self.rewind, self.page_tokens) + 1

    @cached_property
    def num_tiers(self) -> int:
        """K."""
        return len(self.tiers)

    @cached_property
    def ring_pages(self) -> int:
        """R * K: pages of a complete ring."""
        return self.ring_slots * self.num_tiers

    @cached_property
    def keep(self) -> tuple[int, ...]:
        """Kept tokens of a sealed chunk, a tier."""
        return tuple(tier.keep for tier in self.tiers)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Where each tier's pages begin among the S pages of a chunk."""
        offsets, total = [], 0
        for keep in self.keep:
            offsets.append(total)
            total += keep // self.page_tokens
        return tuple(offsets)

    @cached_property
    def pages_per_chunk(self) -> int:
        """S: pages that one sealed chunk takes."""
        return sum(self.keep) // self.page_tokens

    @cached_property
    def state_bytes(self) -> int:
        """Bytes that a layer is charged on each rank for one token of one page: vLLM thinks in layers, so a
        page of G head slots is published as ``layers`` equal parts of ``page_tokens`` states each. The part
        must not happen to be as large as a window layer's block: vLLM would then cut the layers into groups
        of equal count, and take one page from several of ours."""
        slot = self.page_tokens * 2 * self.head_size * self.itemsize
        window_block = self.window_block_bytes // self.ranks
        page = max(self.group_size // self.ranks * slot, window_block)
        # Pages begin at multiples of 64 bytes: what a page table of 32-bit numbers reaches depends on that.
        step = max(self.itemsize, 64 // gcd(64, self.layers * self.page_tokens))
        state = ceil_div(ceil_div(page, self.layers * self.page_tokens), step) * step
        return state + step * (state * self.page_tokens == window_block)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page in the pools of all ranks, with the padding that ``state_bytes`` brings."""
        return self.ranks * self.layers * self.page_tokens * self.state_bytes

    @cached_property
    def window_groups(self) -> int:
        """Page tables that vLLM keeps for the window layers: each holds as many layers as fit in a page."""
        if not self.window_layers:
            return 0
        return ceil_div(self.window_layers, self.page_bytes // self.window_block_bytes)

    @cached_property
    def head_tier(self) -> tuple[tuple[int, ...], ...]:
        """[layers][kv_heads]: the tier of each head."""
        return self._table(lambda tier, member: tier)

    @cached_property
    def head_member(self) -> tuple[tuple[int, ...], ...]:
        """[layers][kv_heads]: the place of each head inside its tier's pages."""
        return self._table(lambda tier, member: member)

    def _table(self, pick: Any) -> tuple[tuple[int, ...], ...]:
        table = [[0] * self.kv_heads for _ in range(self.layers)]
        for index, tier in enumerate(self.tiers):
            for member, (layer, head) in enumerate(tier.heads):
                table[layer][head] = pick(index, member)
        return tuple(tuple(row) for row in table)

    # ---- functions of the length ---------------------------------------------------------------

    def sealed(self, n: int) -> int:
        """Sealed chunks of a sequence with ``n`` tokens in the cache; also what a query at position
        ``n`` sees as sealed."""
        return max(0, n - self.window) // self.chunk

    def boundary(self, chunk: int) -> int:
        """The length at which ``chunk`` is sealed."""
        return (chunk + 1) * self.chunk + self.window

    def next_boundary(self, n: int) -> int:
        """The first boundary above ``n``."""
        return self.boundary(self.sealed(n))

    @cached_property
    def least_wide(self) -> int:
        """New tokens that a step must bring to be worth crossing a boundary. It also bounds how many requests
        of a step do, whose raw tails are copied (:func:`kernels.wide.staged_pages`)."""
        return max(self.page_tokens, self.chunk // 4)

    def sealing(self, n: int) -> int | None:
        """The chunk to seal when exactly ``n`` tokens are in the cache, or None."""
        chunk, rest = divmod(n - self.window, self.chunk)
        return chunk - 1 if rest == 0 and chunk >= 1 else None

    def pages(self, n: int) -> int:
        """Pages that a running sequence of ``n`` tokens holds, exactly."""
        sealed = self.sealed(n)
        if sealed == 0:
            return ceil_div(n, self.page_tokens) * self.num_tiers
        return self.ring_pages + sealed * self.pages_per_chunk

    def ring_index(self, position: int, tier: int) -> int:
        """Index in the row of the page of a raw token."""
        return (position // self.page_tokens) % self.ring_slots * self.num_tiers + tier

    def sealed_index(self, chunk: int, tier: int, token: int) -> int:
        """Index in the row of the page of kept token ``token`` of a sealed chunk."""
        return self.ring_pages + chunk * self.pages_per_chunk + self.prefix[tier] + token // self.page_tokens

    def raw_start(self, n: int) -> int:
        """The first position that a sequence which resumes with ``n`` tokens must still have raw. At a
        boundary the chunk before it belongs to these: it is sealed when the sequence resumes."""
        return self.sealed(max(0, n - 1)) * self.chunk

    def resumed_pages(self, n: int) -> int:
        """Entries at the head of a row that a sequence resuming with ``n`` tokens takes over: its ring and
        the chunks that are sealed for good. A chunk that is sealed at ``n`` itself gets fresh pages."""
        if self.sealed(n) == 0:
            return self.pages(n)
        return self.ring_pages + self.sealed(n - 1) * self.pages_per_chunk

    def ring_entries(self, n: int) -> int:
        """Entries of the ring in the row of a sequence of ``n`` tokens."""
        return self.ring_pages if self.sealed(n) else self.pages(n)

    def raw_entries(self, n: int) -> list[int]:
        """Entries of the ring that hold what a sequence resuming with ``n`` tokens must still have raw."""
        return [
            self.ring_index(position, tier)
            for position in range(self.raw_start(n), n, self.page_tokens)
            for tier in range(self.num_tiers)
        ]

    def row_chunks(self, entries: int) -> int:
        """Sealed chunks in a row of so many entries."""
        return max(0, entries - self.ring_pages) // self.pages_per_chunk

    def oldest_raw(self, n: int) -> int:
        """The first position that a ring can still hold once it was written for ``n`` tokens."""
        return max(0, ceil_div(n, self.page_tokens) - self.ring_slots) * self.page_tokens

    def can_rewind(self, n: int, target: int) -> bool:
        """Whether a sequence whose ring was written for ``n`` tokens can resume from its first ``target``:
        all raw tokens that ``target`` needs must still be in the ring."""
        if not 0 <= target <= n:
            return False
        return self.raw_start(target) >= self.oldest_raw(n)

    def intact(self, n: int, written: int, raw_from: int = 0) -> bool:
        """Whether a ring that was written for ``written`` tokens, and holds nothing before ``raw_from``, has
        all raw tokens that a sequence resuming with ``n`` needs."""
        return self.can_rewind(written, n) and self.raw_start(n) >= raw_from

    # ---- idle sequences --------------------------------------------------------------------------

    def resumable(self, n: int, written: int, raw_from: int = 0, observed: int = 0) -> list[int]:
        """Lengths, multiples of a page, at which an idle sequence of ``n`` tokens can be resumed, rising.
        Those that serve a prompt which leaves it within its last ``rewind`` tokens, and no others: resuming
        further back would destroy more history than it saves.

        Args:
            written, raw_from: see :meth:`intact`.
            observed: tokens before a boundary that must be computed in one go, as their queries rank the
                chunk that is sealed there; 0 for none.
        """
        size = self.page_tokens
        last = n // size * size
        first = max(size, (n - self.rewind) // size * size)
        lengths = {self._observable(m, observed) for m in range(min(first, last), last + 1, size)}
        return sorted(m for m in lengths if m >= size and self.intact(m, written, raw_from))

    def _observable(self, n: int, observed: int) -> int:
        """``n``, or the length from which on all that is ``observed`` before the next boundary (``n`` itself,
        where that is one) is computed again."""
        if not observed:
            return n
        boundary = n if self.sealing(n) is not None else self.next_boundary(n)
        return min(n, boundary - observed)

    def held_entries(self, lengths: Iterable[int]) -> list[int]:
        """Entries of the ring that an idle row holds to be resumed at any of these lengths, rising: all that
        :meth:`raw_entries` names for one of them."""
        size = self.page_tokens
        blocks = {p // size for n in lengths for p in range(self.raw_start(n), n, size)}
        slots = sorted({block % self.ring_slots for block in blocks})
        return [slot * self.num_tiers + tier for slot in slots for tier in range(self.num_tiers)]

    def oldest_held(self, lengths: Iterable[int], n: int) -> int:
        """The position from which on up to ``n``, one of ``lengths``, the ring of such a row has no hole."""
        start = n
        for length in sorted((m for m in lengths if m <= n), reverse=True):
            if length < start:
                break
            start = min(start, self.raw_start(length))
        return start

    def thinnest(self, n: int) -> int | None:
        """The length from which on an idle sequence resumable at ``n`` can be resumed without giving up a
        sealed chunk, and with the fewest raw tokens: the ``prefix_length`` of its last one. What is raw
        there is raw at ``n`` too. None where ``n`` has no sealed chunk, or lies no further."""
        sealed = self.sealed(max(0, n - 1))
        if sealed == 0 or (length := self.prefix_length(sealed - 1)) >= n:
            return None
        return length

    def idle_pages(self, n: int, observed: int = 0) -> int:
        """Pages that an idle sequence of ``n`` tokens holds; fewer where its ring lacks what going back by
        all of ``rewind`` needs, as that of a fork may. 0 where it is too short to be resumed."""
        lengths = self.resumable(n, n, observed=observed)
        if not lengths:
            return 0
        return len(self.held_entries(lengths)) + self.sealed(lengths[-1] - 1) * self.pages_per_chunk

    def prefix_length(self, chunk: int) -> int:
        """The shortest prefix, one page beyond the boundary that seals ``chunk``, that others can continue
        without sealing anything themselves and with the fewest raw tokens."""
        return self.boundary(chunk) + self.page_tokens

    def row_width(self, n: int) -> int:
        """Page ids of the row that vLLM keeps for a request of up to ``n`` tokens: room for a whole ring,
        behind which the kernels look for sealed pages however short ``n`` is, for all of those, and for what
        vLLM's own slot mapping indexes, a page a block of tokens."""
        whole = self.ring_pages + self.sealed(n) * self.pages_per_chunk
        return max(whole, ceil_div(n, self.page_tokens))

    # ---- memory --------------------------------------------------------------------------------

    def window_pages(self, n: int) -> int:
        """Pages that the window layers of a sequence of ``n`` tokens hold while it is idle, at most. They
        trail behind by as much as it can go back, and need not begin at a block's edge."""
        if not self.window_layers:
            return 0
        tokens = min(n, self.window_span - 1 + self.rewind + self.page_tokens)
        return self.window_groups * (ceil_div(tokens, self.window_block_tokens) + (n > tokens))

    def bytes(self, n: int) -> int:
        """Bytes of pool that a running sequence of ``n`` tokens holds, its window layers included."""
        return (self.pages(n) + self.window_pages(n)) * self.page_bytes

    def idle_bytes(self, n: int, observed: int = 0) -> int:
        """The same of an idle sequence, see :meth:`idle_pages`; 0 where it is too short to be resumed."""
        pages = self.idle_pages(n, observed)
        return (pages + self.window_pages(n)) * self.page_bytes if pages else 0

    def full_bytes(self, n: int) -> int:
        """Bytes that a full cache of ``n`` tokens takes, in whole pages of ``page_tokens``, beside the same
        window layers."""
        tokens = ceil_div(n, self.page_tokens) * self.page_tokens
        return (
            self.window_pages(n) * self.page_bytes
            + tokens * self.layers * self.kv_heads * 2 * self.head_size * self.itemsize
        )

    def kept_tokens(self, n: int, tier: int) -> int:
        """Tokens of a sequence of ``n`` that the heads of a tier still see."""
        sealed = self.sealed(n)
        return sealed * self.keep[tier] + n - sealed * self.chunk

    def tier_pages(self, n: int, tier: int) -> int:
        """A tier's share of ``pages(n)``; over all tiers these add up to it."""
        sealed = self.sealed(n)
        if sealed == 0:
            return ceil_div(n, self.page_tokens)
        return self.ring_slots + sealed * self.keep[tier] // self.page_tokens

    def kept_fraction(self, n: int) -> float:
        """Mean over all heads of the share of ``n`` tokens that a head still sees, from 0 to 1."""
        if n <= 0:
            return 1.0
        seen = sum(self.kept_tokens(n, index) * len(tier.heads) for index, tier in enumerate(self.tiers))
        return seen / (n * self.layers * self.kv_heads)

    @cached_property
    def budget(self) -> float:
        """Mean over all heads of the share of a sealed chunk that is kept."""
        heads = self.layers * self.kv_heads
        return sum(tier.keep * len(tier.heads) for tier in self.tiers) / (heads * self.chunk)

    @cached_property
    def padding(self) -> float:
        """Share of a sealed chunk's pool bytes that no head uses: empty slots of partly filled tiers
        and the rounding of ``state_bytes``."""
        used = sum(tier.keep * len(tier.heads) for tier in self.tiers) * 2 * self.head_size * self.itemsize
        return 1.0 - used / (self.pages_per_chunk * self.page_bytes)

    # ---- exchange ------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form, with the derived counts that readers want."""
        return {
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_size": self.head_size,
            "itemsize": self.itemsize,
            "page_tokens": self.page_tokens,
            "chunk": self.chunk,
            "window": self.window,
            "rewind": self.rewind,
            "group_size": self.group_size,
            "tiers": [
                {"keep": tier.keep, "heads": [list(head) for head in tier.heads]} for tier in self.tiers
            ],
            **{name: getattr(self, name) for name in WINDOW_FIELDS},
            "ranks": self.ranks,
            "ring_slots": self.ring_slots,
            "page_bytes": self.page_bytes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """The inverse of :meth:`to_dict`. Raises ConfigError naming the field that is wrong."""
        try:
            tiers = tuple(
                Tier(int(tier["keep"]), tuple((int(layer), int(head)) for layer, head in tier["heads"]))
                for tier in data["tiers"]
            )
            names = (
                "layers",
                "kv_heads",
                "head_size",
                "itemsize",
                "page_tokens",
                "chunk",
                "window",
                "rewind",
            )
            numbers = {name: int(data[name]) for name in names}
            numbers |= {name: int(data.get(name, 0)) for name in WINDOW_FIELDS}
            numbers["ranks"] = int(data.get("ranks", 1))
            return cls(**numbers, group_size=int(data["group_size"]), tiers=tiers)
        except KeyError as missing:
            raise ConfigError(str(missing.args[0]), "missing from the geometry") from None
        except (TypeError, ValueError) as wrong:
            raise ConfigError("geometry", f"not understood: {wrong}") from None


def uniform_tiers(heads: Sequence[Head], group_size: int, keep: int) -> tuple[Tier, ...]:
    """Cut ``heads`` in order into tiers of ``group_size`` that all keep ``keep`` tokens a chunk."""
    return tuple(Tier(keep, tuple(heads[i : i + group_size])) for i in range(0, len(heads), group_size))
