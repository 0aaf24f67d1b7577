"""Load a compiled CUDA library and call its kernels on tensors.

Calls wait for nothing and allocate nothing but, once for each device, the workspace of attention: they can be
captured in a CUDA graph. Calls on one device must follow one another, as those of one stream do, because they
share that workspace.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from kernels.cuda import build
from kernels.errors import KernelBuildError, KernelError

# The structures of the headers, packed in the order of their fields there.
_STEP = struct.Struct("7P3q10i")  # tangram::Step, step.cuh
_FRESH = struct.Struct("2P4q2i")  # tangram::Fresh, append.cuh
_ATTEND = struct.Struct("7P4q4i2f")  # tangram::Attend, attend.cuh
_LAUNCH = struct.Struct("2i")  # behind both in AppendAttend, binding.cu
_WIDE = struct.Struct("10P8q8i")  # tangram::Wide, wide.cuh
_SEAL = struct.Struct("5P2i")  # tangram::Seal, seal.cuh

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# What the registered operators take after the pool, from ``rows`` to ``window``.
Step = tuple[*Tables, int, int, int, int]

# Scale, sinks and soft cap of the scores.
Scoring = tuple[float, torch.Tensor | None, float]


class Native:
    """The functions of one compiled library: one element type, one head size.

    Raises:
        KernelBuildError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._append = library.tangram_append
            self._attention = library.tangram_attention
            self._decode = library.tangram_decode
            self._seal = library.tangram_seal
            self._stage = library.tangram_stage
            self._unpack = library.tangram_unpack
            self._workspace = library.tangram_workspace
            self._error = library.tangram_error
        except (OSError, AttributeError) as error:
            raise KernelBuildError(f"cannot load {path}: {error}") from error
        launches = (self._append, self._attention, self._decode, self._seal, self._stage, self._unpack)
        for function in launches:
            function.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
            function.restype = ctypes.c_int
        self._workspace.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
        self._workspace.restype = ctypes.c_int
        self._error.argtypes = (ctypes.c_int,)
        self._error.restype = ctypes.c_char_p
        self._workspaces: dict[int, tuple[torch.Tensor, ...]] = {}

    def append(self, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, step: Step) -> None:
        """``ragged_append``."""
        self._run(self._append, pool, _step(key.shape[0], pool, step), _fresh(key, value))

    def attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pool: torch.Tensor,
        step: Step,
        scale: float,
        sinks: torch.Tensor | None = None,
        soft_cap: float = 0.0,
        max_query: int = 0,
        singles: bool = True,
    ) -> None:
        """``ragged_attention``."""
        attend = self._attend(out, query, pool, (scale, sinks, soft_cap), (max_query, singles))
        self._run(self._attention, pool, _step(query.shape[0], pool, step), attend)

    def decode(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        step: Step,
        scoring: Scoring,
        launch: str,
    ) -> None:
        """``ragged_append_attention`` where no request has more than one new token; ``launch``: one of
        ``choice.DECODE_LAUNCHES``, not ``separate``."""
        attend = self._attend(out, query, pool, scoring, (1, True), launch == "early")
        rest = attend + _fresh(key, value) + _LAUNCH.pack(launch != "fused", 0)
        self._run(self._decode, pool, _step(query.shape[0], pool, step), rest)

    def _attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pool: torch.Tensor,
        scoring: Scoring,
        hints: tuple[int, bool],
        tables_first: bool = False,
    ) -> bytes:
        scale, sinks, soft_cap = scoring
        workspace = (tensor.data_ptr() for tensor in self.workspace(pool.device))
        pointers = (out.data_ptr(), query.data_ptr(), _address(sinks), *workspace)
        strides = (*out.stride()[:2], *query.stride()[:2])
        return _ATTEND.pack(*pointers, *strides, query.shape[1], *hints, tables_first, scale, soft_cap)

    def seal(
        self,
        pool: torch.Tensor,
        rows: torch.Tensor,
        due: torch.Tensor,
        tier_offset: torch.Tensor,
        tier_heads: torch.Tensor,
        geometry: tuple[int, int, int, int],
        sink: int,
        scores: torch.Tensor | None,
        layer: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    ) -> None:
        """``ragged_seal``; ``layer``: its last four arguments."""
        head_tier, head_member, staged, origin = layer
        pointers = (_address(tensor) for tensor in (due, tier_heads, scores, staged, origin))
        heads = 0 if head_tier is None else head_tier.shape[0]
        tables = (0, 0, _address(head_tier), _address(head_member))
        step = _pack_step(pool, rows, tables, tier_offset, 0, heads, geometry)
        self._run(self._seal, pool, step, _SEAL.pack(*pointers, due.shape[0], sink))

    def stage(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        tables: tuple[torch.Tensor, ...],
        geometry: tuple[int, int, int, int],
        plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        places: tuple[int, int],
        most: tuple[int, int, int],
    ) -> None:
        """``ragged_stage``; ``tables``: rows, head_tier, head_member, tier_offset; the rest in its order."""
        rows, head_tier, head_member, tier_offset = tables
        requests, segments, _ = plan
        _, packed, table, _ = buffers
        pointers = (tensor.data_ptr() for tensor in (*plan, query, key, value, *buffers))
        strides = (stride for tensor in (query, key, value) for stride in tensor.stride()[:2])
        counts = (requests.shape[0], segments.shape[0], packed.shape[1], table.shape[1])
        wide = _WIDE.pack(*pointers, *strides, *places, *counts, *most, 0)
        heads = (0, 0, head_tier.data_ptr(), head_member.data_ptr())
        sizes = (query.shape[0], head_tier.shape[0])
        self._run(self._stage, pool, _pack_step(pool, rows, heads, tier_offset, *sizes, geometry), wide)

    def unpack(
        self,
        out: torch.Tensor,
        packed: torch.Tensor,
        segments: torch.Tensor,
        starts: torch.Tensor,
        kv_heads: int,
        most_tokens: int,
    ) -> None:
        """``ragged_unpack``."""
        pointers = (
            0,
            segments.data_ptr(),
            starts.data_ptr(),
            out.data_ptr(),
            0,
            0,
            0,
            packed.data_ptr(),
            0,
            0,
        )
        strides = (*out.stride()[:2], 0, 0, 0, 0)
        counts = (1, segments.shape[0], packed.shape[1], 0)
        wide = _WIDE.pack(*pointers, *strides, 1, 0, *counts, 0, 0, most_tokens, 0)
        step = _STEP.pack(*(0,) * 10, *(0, 0, out.shape[0], kv_heads, 0, 0), *(0, 0, 0, 0))
        self._run(self._unpack, out, step, wide)

    def workspace(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Where blocks that share a history leave their sums, the counters of those that have, a plan.

        Raises:
            KernelError: a graph is being captured before the first call on this device.
        """
        index = _index(device)
        if index not in self._workspaces:
            if torch.cuda.is_current_stream_capturing():
                raise KernelError("ragged attention must run once before it is captured in a graph")
            sizes = (ctypes.c_int64 * 4)()
            self._check(self._workspace(index, sizes))
            partial, counters, plan, pieces = sizes
            self._workspaces[index] = (
                torch.empty(partial, dtype=torch.uint8, device=device),
                torch.zeros(counters, dtype=torch.int32, device=device),
                torch.empty(plan, dtype=torch.int32, device=device),
                torch.empty(pieces, dtype=torch.uint8, device=device),
            )
        return self._workspaces[index]

    def _run(self, function: Callable[..., int], pool: torch.Tensor, step: bytes, rest: bytes) -> None:
        stream = torch.cuda.current_stream(pool.device).cuda_stream
        self._check(function(step, rest, _index(pool.device), stream))

    def _check(self, error: int) -> None:
        if error:
            raise KernelError(f"a ragged kernel could not be launched: {self._error(error).decode()}")


@cache
def load(variant: build.Variant) -> Native:
    """The library of a variant, compiled if need be and loaded once.

    Raises:
        KernelBuildError: it cannot be built or loaded.
    """
    return Native(build.library(variant))


@cache
def architecture(device: torch.device) -> str:
    """The device's architecture as nvcc names it."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _fresh(key: torch.Tensor, value: torch.Tensor) -> bytes:
    strides = (*key.stride()[:2], *value.stride()[:2])
    return _FRESH.pack(key.data_ptr(), value.data_ptr(), *strides, key.shape[2], key.element_size())


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _step(tokens: int, pool: torch.Tensor, step: Step) -> bytes:
    rows, query_start_loc, seq_lens, head_tier, head_member, tier_offset, *geometry = step
    pointers = (
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        head_tier.data_ptr(),
        head_member.data_ptr(),
    )
    return _pack_step(pool, rows, pointers, tier_offset, tokens, head_tier.shape[0], geometry)


def _pack_step(
    pool: torch.Tensor,
    rows: torch.Tensor,
    pointers: tuple[int, int, int, int],
    tier_offset: torch.Tensor,
    tokens: int,
    heads: int,
    geometry: Sequence[int],
) -> bytes:
    requests, width = rows.shape
    pages, members, _, _ = pool.shape
    return _STEP.pack(
        rows.data_ptr(),
        *pointers,
        tier_offset.data_ptr(),
        pool.data_ptr(),
        *(rows.stride(0), pool.stride(0), pages),
        *(width, requests, tokens, heads, tier_offset.shape[0] - 1, members),
        *geometry,
    )
