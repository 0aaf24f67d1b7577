"""Load a compiled CUDA library and call its kernels on tensors.

Calls wait for nothing and allocate nothing but, once for each device, the workspace of attention: they can be
captured in a CUDA graph. Calls on one device must follow one another, as those of one stream do, because they
share that workspace.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.cuda import build
from kernels.cuda.packing import (
    Scoring,
    Step,
    address,
    attend_bytes,
    decode_bytes,
    fresh_bytes,
    pack_step,
    seal_bytes,
    stage_bytes,
    step_bytes,
    unpack_bytes,
    unpack_step_bytes,
)
from kernels.errors import KernelBuildError, KernelError

FUNCTIONS = ("append", "attention", "decode", "seal", "stage", "unpack")
"""Of a library, without ``tangram_``; see ``binding.cu``."""


class Native:
    """The functions of one compiled library: one element type, one head size.

    Raises:
        KernelBuildError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._functions: dict[str, Any] = {
                name: getattr(library, f"tangram_{name}") for name in FUNCTIONS
            }
            self._workspace = library.tangram_workspace
            self._error = library.tangram_error
        except (OSError, AttributeError) as error:
            raise KernelBuildError(f"cannot load {path}: {error}") from error
        for function in self._functions.values():
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
            function.restype = ctypes.c_int
        self._workspace.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
        self._workspace.restype = ctypes.c_int
        self._error.argtypes = (ctypes.c_int,)
        self._error.restype = ctypes.c_char_p
        self._workspaces: dict[int, tuple[torch.Tensor, ...]] = {}

    def append(self, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, step: Step) -> None:
        """``ragged_append``."""
        self._run("append", pool, step_bytes(key.shape[0], pool, step), fresh_bytes(key, value))

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
        attend = attend_bytes(
            out, query, self.workspace(pool.device), (scale, sinks, soft_cap), (max_query, singles)
        )
        self._run("attention", pool, step_bytes(query.shape[0], pool, step), attend)

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
        rest = decode_bytes(out, query, key, value, self.workspace(pool.device), scoring, launch)
        self._run("decode", pool, step_bytes(query.shape[0], pool, step), rest)

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
        values: bool = False,
        asked: torch.Tensor | None = None,
    ) -> None:
        """``ragged_seal``; ``layer``: its four arguments from ``head_tier`` on."""
        head_tier, head_member, staged, origin = layer
        heads = 0 if head_tier is None else head_tier.shape[0]
        tables = (0, 0, address(head_tier), address(head_member))
        step = pack_step(pool, rows, tables, tier_offset, 0, heads, geometry)
        rest = seal_bytes(due, tier_heads, scores, staged, origin, sink, values, asked)
        self._run("seal", pool, step, rest)

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
        wide = stage_bytes(query, key, value, plan, buffers, places, most)
        heads = (0, 0, head_tier.data_ptr(), head_member.data_ptr())
        sizes = (query.shape[0], head_tier.shape[0])
        self._run("stage", pool, pack_step(pool, rows, heads, tier_offset, *sizes, geometry), wide)

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
        step = unpack_step_bytes(out.shape[0], kv_heads)
        self._run("unpack", out, step, unpack_bytes(out, packed, segments, starts, most_tokens))

    def workspace(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Where blocks that share a history leave their sums, the counters of those that have, a plan.

        Raises:
            KernelError: a graph is being captured before the first call on this device.
        """
        index = index_of(device)
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

    def run(self, name: str, index: int, step: bytes | int, rest: bytes | int) -> None:
        """Launch on the current stream of the device with this index.

        Args:
            name: one of ``FUNCTIONS``. step, rest: its structures, or their addresses.

        Raises:
            KernelError: it cannot be launched.
        """
        # What compiled graphs ask as well: torch.cuda.current_stream makes an object, in ten times as long.
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._check(self._functions[name](step, rest, index, stream))

    def _run(self, name: str, pool: torch.Tensor, step: bytes, rest: bytes) -> None:
        self.run(name, index_of(pool.device), step, rest)

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


def index_of(device: torch.device) -> int:
    """Of a GPU among those of this process."""
    return torch.cuda.current_device() if device.index is None else device.index
