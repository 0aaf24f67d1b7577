"""What a layer of a wide step calls before and after its dense attention: see :mod:`kernels.wide`.

One object serves all layers of a step whose tensors have the same shapes and strides. What does not differ
between them is allocated, checked and, on a GPU, packed once (:mod:`kernels.cuda.wide_calls`): the host has
to launch these calls in less time than the GPU takes for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cuda.wide_calls import PackedCalls
from kernels.layout import RaggedLayout
from kernels.ragged import ragged_append_attention
from kernels.sealing import ragged_seal
from kernels.wide import Sequences, WidePlan

Heads = tuple[torch.Tensor, torch.Tensor]
"""(head_tier, head_member) of a layer, int32 [kv_heads] each."""


@dataclass(frozen=True)
class Others:
    """The step's requests that cross no boundary.

    Attributes:
        query_start_loc: int32 [requests + 1]. seq_lens: int32 [requests], 0 for wide requests.
        max_query, singles: hints, see :func:`kernels.ragged_attention`.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query: int
    singles: bool


@dataclass(frozen=True)
class WideTask:
    """What all layers of a wide step share.

    Attributes:
        rows: int32 [requests, width].
        sink: first tokens of a sequence that are always kept.
        scale, soft_cap: of the scores.
        values: whether what is kept depends on the norms of values, too.
        asked: float32 [layers, chunks due, kv_heads, head_size], what heads are asked, if it depends on that.
    """

    sequences: Sequences
    plan: WidePlan
    rows: torch.Tensor
    others: Others | None
    sink: int
    scale: float
    soft_cap: float
    values: bool = False
    asked: torch.Tensor | None = None

    @property
    def layout(self) -> RaggedLayout:
        """The sizes behind a row."""
        return self.sequences.layout


class WideCalls:
    """The calls as registered operators, on any device.

    Attributes:
        packed, answers: [wide tokens * kv_heads, query heads / kv_heads, head_size]: what dense attention
            reads and writes.
        table: int32 [sequences, width]; used: int32 [sequences], see :class:`kernels.wide.Sequences`.
    """

    def __init__(self, task: WideTask, query: torch.Tensor) -> None:
        self.task = task
        self.packed, self.table, self.used = task.sequences.buffers(query, task.plan)
        self.answers = torch.empty_like(self.packed)
        self._none = task.rows.new_zeros(task.layout.tiers)  # sealing one layer's heads does not read it

    def enter(
        self, out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads
    ) -> None:
        """Write and attend what crosses no boundary; write and stage the rest.

        Args:
            out, query: [tokens, query heads, head_size]; key, value: [tokens, kv_heads, head_size].
        """
        task, others = self.task, self.task.others
        if others is not None:
            batch = (task.sequences.pool, task.rows, others.query_start_loc, others.seq_lens, *heads)
            how = (task.scale, None, task.soft_cap, others.max_query, others.singles)
            ragged_append_attention(out, query, key, value, *batch, task.layout, *how)
        buffers = (self.packed, self.table, self.used)
        task.sequences.stage(query, key, value, task.rows, *heads, task.plan, buffers)

    def seal(self, heads: Heads, layer: int) -> None:
        """Seal the chunks that are due in a layer; between :meth:`enter` and dense attention.

        Args:
            layer: its row in the task's ``asked``.
        """
        task, plan = self.task, self.task.plan
        staged = (task.sequences.staged, plan.origin)
        ragged_seal(
            task.sequences.pool,
            task.rows,
            plan.due,
            self._none,
            task.layout,
            task.sink,
            heads=heads,
            staged=staged,
            values=task.values,
            asked=None if task.asked is None else task.asked[layer],
        )

    def leave(self, out: torch.Tensor) -> None:
        """Put ``answers`` where their tokens have theirs."""
        self.task.sequences.unpack(out, self.answers, self.task.plan)


def wide_calls(
    task: WideTask,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: Heads,
) -> WideCalls | PackedCalls:
    """The calls for a step's layers, given the tensors of one of them, which are checked.

    Raises:
        KernelError: the step stages more than there is room for.
        ValueError, TypeError: a tensor does not fit.
    """
    calls = WideCalls(task, query)
    return PackedCalls.of(calls, out, query, key, value, heads) or calls
