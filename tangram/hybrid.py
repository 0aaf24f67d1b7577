"""Sliding-window layers, on the scheduler's side.

vLLM's own managers hand out the window layers' blocks, from the pool that our pages come from, and drop them
behind the window. Three things are left to do here:

- A conversation can only be resumed where its window layers can: their last window of blocks must still be
  there. :class:`Windows` asks their managers, so that no other length is ever offered.
- While a conversation is idle, vLLM would let these blocks go, first come, first served. They are held with
  the conversation's row (*companions*), count as its pages, and are let go with it.
- Room for a step is room for the window layers' blocks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec

from tangram.errors import CacheIntegrityError
from tangram.geometry import ceil_div


class ByPool:
    """A manager's method that vLLM also calls on the class, naming the pool: it finds the instance.

    With one kind of layers vLLM asks the manager for the longest hit, with several it asks the class.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._instances: WeakKeyDictionary[BlockPool, Any] = WeakKeyDictionary()

    def register(self, instance: Any, pool: BlockPool) -> None:
        """Remember whose pool this is."""
        self._instances[pool] = instance

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            of = self._instances[kwargs["block_pool"]] if instance is None else instance
            return self._method(of, *args, **kwargs)

        return call


def page_hashes(hashes: Sequence[Any], pool: BlockPool, page_tokens: int) -> Sequence[Any]:
    """The hashes at the ends of our pages; vLLM's are as fine as the smallest block of any layer."""
    each = page_tokens // pool.hash_block_size
    return hashes if each == 1 else hashes[each - 1 :: each]  # a hash stands for all of its prefix


class Windows:
    """The sliding-window managers of an engine; without any, every answer is the harmless one.

    Args:
        pool: the pool of all blocks.
        managers: in the order of the engine's cache groups, ours left out.
        alignment: tokens that every length must be a multiple of.
    """

    def __init__(
        self, pool: BlockPool, managers: Sequence[SlidingWindowManager] = (), alignment: int = 1
    ) -> None:
        self._pool = pool
        self._managers = tuple(managers)
        self._alignment = alignment
        self._kinds: list[tuple[KVCacheSpec, list[int]]] = []
        for manager in managers:
            for spec, groups in self._kinds:
                if spec == manager.kv_cache_spec:
                    groups.append(manager.kv_cache_group_id)
                    break
            else:
                self._kinds.append((manager.kv_cache_spec, [manager.kv_cache_group_id]))
        self._held: dict[Hashable, list[KVCacheBlock]] = {}
        self._counts: Counter[int] = Counter()  # block id -> rows that hold it

    @classmethod
    def of(cls, coordinator: KVCacheCoordinator, trailing: int) -> Windows:
        """Take the window managers of an engine under our care.

        vLLM keeps the window's blocks at the end of a prompt only, and lets go of all others at once. Here
        conversations are resumed behind their answers, up to ``trailing`` tokens before the end: so all
        blocks get their hashes, and the window trails behind by as much.
        """
        managers = [m for m in coordinator.single_type_managers if isinstance(m, SlidingWindowManager)]
        coordinator.retention_interval = None
        for manager in managers:
            manager.extra_retained_tokens += trailing
            if manager.max_admission_blocks_per_request is not None:
                manager.max_admission_blocks_per_request += ceil_div(trailing, manager.block_size)
        return cls(coordinator.block_pool, managers, coordinator.scheduler_block_size)

    def __bool__(self) -> bool:
        return bool(self._managers)

    # ---- resuming ---------------------------------------------------------------------------------------

    def blocks_at(self, hashes: Sequence[Any], length: int) -> list[KVCacheBlock] | None:
        """The blocks that the window layers need to continue after ``length`` tokens, or None when one of
        them is gone. Asked of vLLM's own lookup, so that it will find the same."""
        needed: list[KVCacheBlock] = []
        for spec, groups in self._kinds:
            found, length_found = SlidingWindowManager.find_longest_cache_hit(
                block_hashes=hashes,
                max_length=length,
                kv_cache_group_ids=groups,
                block_pool=self._pool,
                kv_cache_spec=spec,
                drop_eagle_block=False,
                alignment_tokens=self._alignment,
            )
            if length_found != length:
                return None
            needed.extend(block for blocks in found for block in blocks if not block.is_null)
        return needed

    # ---- idle conversations -----------------------------------------------------------------------------

    def hold(self, row: Hashable, hashes: Sequence[Any], lengths: Iterable[int]) -> None:
        """Keep what the window layers need to resume an idle row after any of ``lengths``, as far as it is
        still there."""
        found = {b.block_id: b for length in lengths for b in self.blocks_at(hashes, length) or ()}
        if found:
            blocks = list(found.values())
            self._pool.touch(blocks)
            self._held[row] = blocks
            self._counts.update(list(found))

    def release(self, row: Hashable) -> None:
        """The row is taken over or evicted: let its window blocks go."""
        blocks = self._held.pop(row, [])
        self._counts -= Counter(block.block_id for block in blocks)
        self._pool.free_blocks(reversed(blocks))

    def held(self, row: Hashable) -> list[int]:
        """Blocks held with a row."""
        return [block.block_id for block in self._held.get(row, ())]

    def passed_on(self, row: Hashable) -> int:
        """Blocks held with a row that whoever takes it over uses, or lets go."""
        return self._own(self._held.get(row, ()))

    def releasable(self, spared: Iterable[Hashable] = ()) -> int:
        """Blocks that evicting all rows but these would free: nobody but rows holds them."""
        kept = {block.block_id for row in spared for block in self._held.get(row, ())}
        blocks = self._pool.blocks
        return sum(blocks[i].ref_cnt == count and i not in kept for i, count in self._counts.items())

    # ---- room -------------------------------------------------------------------------------------------

    def missing(self, request_id: str, num_tokens: int, resumed: int, *args: Any, **kwargs: Any) -> int:
        """Blocks that the window layers of a request will ask for beyond those that hold ``resumed`` tokens.
        The other arguments are those of the managers' ``get_num_blocks_to_allocate``, without
        ``new_computed_blocks``."""
        return sum(
            manager.get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                [self._pool.null_block] * (resumed // manager.block_size),
                *args,
                **kwargs,
            )
            for manager in self._managers
        )

    def pending(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the window layers of a running request will still ask for in the allocation that is
        going on: their managers have their turns before and after ours."""
        return self.missing(request_id, num_tokens, 0, num_tokens, num_tokens, num_tokens)

    def most(self, tokens: int) -> int:
        """Blocks that the window layers of a request of ``tokens`` hold at any time, at most."""
        return sum(self._most(manager, tokens) for manager in self._managers)

    def outstanding(self, request_id: str, tokens: int) -> int:
        """Blocks that the window layers of a running request may still ask for until it has ``tokens``."""
        return sum(
            max(0, self._most(manager, tokens) - self._own(manager.req_to_blocks.get(request_id, ())))
            for manager in self._managers
        )

    @staticmethod
    def _own(blocks: Iterable[KVCacheBlock]) -> int:
        """Blocks that nobody else holds: letting them go frees them."""
        return sum(block.ref_cnt == 1 and not block.is_null for block in blocks)

    @staticmethod
    def _most(manager: SlidingWindowManager, tokens: int) -> int:
        blocks = ceil_div(tokens, manager.block_size)
        cap = manager.max_admission_blocks_per_request
        return blocks if cap is None else min(blocks, cap)

    # ---- looking in -------------------------------------------------------------------------------------

    def running(self, request_id: str) -> list[int]:
        """Blocks of a running request's window layers."""
        return [
            block.block_id
            for manager in self._managers
            for block in manager.req_to_blocks.get(request_id, ())
            if not block.is_null
        ]

    def in_use(self) -> int:
        """Blocks that are not free because of the window layers.

        Raises:
            CacheIntegrityError: one is referenced more or less often than it is held.
        """
        holders = Counter(self._counts)
        for manager in self._managers:
            for blocks in manager.req_to_blocks.values():
                holders.update(block.block_id for block in blocks if not block.is_null)
        if any(self._pool.blocks[i].ref_cnt != count for i, count in holders.items()):
            raise CacheIntegrityError("a sliding-window block is not referenced as often as it is held")
        return len(holders)
