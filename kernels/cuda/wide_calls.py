"""The calls of :mod:`kernels.wide_calls` on a GPU, their arguments packed once for all layers of a step.

Layers differ in the addresses of a few tensors, which are filled in, and in nothing else. So the host checks,
dispatches and packs once a step, not once a layer.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import torch

from kernels.checks import check_batch, check_tokens
from kernels.cuda import dispatch, packing
from kernels.cuda.native import Native, index_of

if TYPE_CHECKING:
    from kernels.wide_calls import Heads, WideCalls

_ADDRESSES = tuple(struct.Struct(f"{count}P") for count in range(4))


class Block:
    """A packed structure whose addresses can be changed in place.

    Attributes:
        address: where it lies, in bytes; it stays.
    """

    def __init__(self, packed: bytes) -> None:
        self._bytes = bytearray(packed)
        self._held = (ctypes.c_char * len(packed)).from_buffer(self._bytes)
        self.address = ctypes.addressof(self._held)

    def fill(self, at: int, *addresses: int) -> None:
        """Put up to three addresses from byte ``at`` on."""
        _ADDRESSES[len(addresses)].pack_into(self._bytes, at, *addresses)


class PackedCalls:
    """As :class:`kernels.wide_calls.WideCalls`, for tensors with the same shapes, strides and alignment as
    those that it was made from. Made by :meth:`of`.

    Attributes:
        packed, answers, table, used: of the calls that it stands for.
    """

    def __init__(
        self,
        library: Native,
        calls: WideCalls,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: Heads,
    ) -> None:
        task, plan, sequences = calls.task, calls.task.plan, calls.task.sequences
        pool, others = sequences.pool, task.others
        self.packed, self.answers, self.table, self.used = (
            calls.packed,
            calls.answers,
            calls.table,
            calls.used,
        )
        self._library, self._index = library, index_of(pool.device)
        self._held = calls  # what the addresses lead to
        lengths = (task.rows, task.rows) if others is None else (others.query_start_loc, others.seq_lens)
        step: packing.Step = (task.rows, *lengths, *heads, *task.layout.operands(pool.device))
        self._step = Block(packing.step_bytes(query.shape[0], pool, step))
        buffers = (sequences.staged, self.packed, self.table, self.used)
        tables = (plan.requests, plan.segments, plan.starts)
        places, most = (
            (sequences.unit, sequences.staged_at),
            (plan.most_tail, plan.most_new, plan.most_queries),
        )
        self._stage = Block(packing.stage_bytes(query, key, value, tables, buffers, places, most))
        self._seal = Block(
            packing.seal_bytes(
                plan.due, task.rows, None, sequences.staged, plan.origin, task.sink, task.values, task.asked
            )
        )
        self._unpack = Block(
            packing.unpack_bytes(out, self.answers, plan.segments, plan.starts, plan.most_queries)
        )
        self._fresh = Block(packing.fresh_bytes(key, value))
        self._attend: Block | None = None
        self._decode: Block | None = None
        if others is None:
            return
        scoring, workspace = (task.scale, None, task.soft_cap), library.workspace(pool.device)
        if others.max_query == 1 and dispatch.launch() != "separate":
            whole = packing.decode_bytes(out, query, key, value, workspace, scoring, dispatch.launch())
            self._decode = Block(whole)
        else:
            hints = (others.max_query, others.singles)
            self._attend = Block(packing.attend_bytes(out, query, workspace, scoring, hints))

    @classmethod
    def of(
        cls,
        calls: WideCalls,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: Heads,
    ) -> PackedCalls | None:
        """Calls for such tensors of a layer, which are checked; None where the kernels do not take them.

        Raises:
            ValueError, TypeError: a tensor does not fit.
        """
        task = calls.task
        pool, layout = task.sequences.pool, task.layout
        if not pool.is_cuda:
            return None
        group = query.shape[1] // key.shape[1]
        if (
            not dispatch.fits(pool, layout.page_tokens)
            or layout.chunk > dispatch.MOST_CHUNK
            or group > dispatch.MOST_DECODE_GROUP
            or not all(dispatch.aligned(tensor, 16) for tensor in (out, query, key, value))
            or (library := dispatch.native(pool.device, pool.dtype, layout.head_size)) is None
        ):
            return None
        check_tokens("key", key, pool, heads[0].shape[0], layout.head_size)
        check_tokens("value", value, pool, heads[0].shape[0], layout.head_size)
        check_tokens("query", query, pool, group * key.shape[1], layout.head_size)
        check_tokens("out", out, pool, query.shape[1], layout.head_size)
        if task.others is not None:
            check_batch(pool, task.rows, task.others.query_start_loc, task.others.seq_lens, *heads)
        return cls(library, calls, out, query, key, value, heads)

    def enter(
        self, out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads
    ) -> None:
        """As :meth:`WideCalls.enter`. The calls after it are about this layer."""
        self._step.fill(packing.STEP_HEADS, heads[0].data_ptr(), heads[1].data_ptr())
        to, read, keys, values = out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr()
        if self._decode is not None:
            self._decode.fill(packing.ATTEND_OUT, to, read)
            self._decode.fill(packing.DECODE_NEW, keys, values)
            self._run("decode", self._decode)
        elif self._attend is not None:
            self._fresh.fill(packing.FRESH_NEW, keys, values)
            self._run("append", self._fresh)
            self._attend.fill(packing.ATTEND_OUT, to, read)
            self._run("attention", self._attend)
        self._stage.fill(packing.WIDE_QUERY, read, keys, values)
        self._run("stage", self._stage)

    def seal(self, heads: Heads, layer: int) -> None:
        """As :meth:`WideCalls.seal`."""
        del heads  # they are in the step since enter
        if (asked := self._held.task.asked) is not None:
            self._seal.fill(packing.SEAL_ASKED, asked.data_ptr() + layer * asked.stride(0) * asked.itemsize)
        self._run("seal", self._seal)

    def leave(self, out: torch.Tensor) -> None:
        """As :meth:`WideCalls.leave`."""
        self._unpack.fill(packing.WIDE_QUERY, out.data_ptr())
        self._run("unpack", self._unpack)

    def _run(self, name: str, rest: Block) -> None:
        self._library.run(name, self._index, self._step.address, rest.address)
