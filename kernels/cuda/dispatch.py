"""The CUDA side of the registered operators: the compiled kernels where they fit, else the references."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from kernels import fallback
from kernels.choice import decode_launch, implementation
from kernels.cuda import build
from kernels.cuda.native import Native, architecture, load
from kernels.cuda.packing import Scoring
from kernels.errors import KernelBuildError

logger = logging.getLogger(__name__)

# A chunk's scores lie in shared memory while it is sealed. A block's rows hold whole groups of query heads.
MOST_CHUNK = 8192
MOST_GROUP = 64
# Query heads of a KV head that the kernel for single new tokens takes: the rows of one matrix product.
MOST_DECODE_GROUP = 16


@cache
def native(device: torch.device, dtype: torch.dtype, head_size: int) -> Native | None:
    """The compiled kernels for these elements and heads, or None where the references must do.

    Raises:
        KernelConfigError: ``TANGRAM_KERNELS`` is not understood.
        KernelBuildError: it is ``native`` and the library cannot be built.
    """
    choice = implementation()
    if choice == "reference" or dtype not in build.ELEMENTS or head_size % 32 or head_size > 256:
        return None
    arch = architecture(device)
    if int(arch.removeprefix("sm_")) < 80:
        return None
    try:
        return load(build.Variant(dtype, head_size, arch))
    except KernelBuildError as error:
        if choice == "native":
            raise
        logger.warning("CUDA kernels are unavailable, attention will be slow: %s", error)
        return None


def prepare(device: torch.device, dtype: torch.dtype, head_size: int) -> None:
    """Compile and load the kernels, and allocate their workspace.

    Raises:
        KernelError: as ``native`` and ``launch``.
    """
    launch()
    library = native(device, dtype, head_size)
    if library is not None:
        library.workspace(device)


def append(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, *step: Any) -> None:
    """``tangram::ragged_append`` on a GPU; the arguments are those of ``kernels.fallback``."""
    library = native(pool.device, pool.dtype, key.shape[2])
    if library is None:
        fallback.append(key, value, pool, *step)
    else:
        library.append(key, value, pool, step)


def attention(out: torch.Tensor, query: torch.Tensor, pool: torch.Tensor, *rest: Any) -> None:
    """``tangram::ragged_attention`` on a GPU; the arguments are those of ``kernels.fallback``."""
    step, scoring = rest[:10], rest[10:]
    _, query_start_loc, _, head_tier, _, _, page_tokens, *_ = step
    library = native(pool.device, pool.dtype, query.shape[2]) if fits(pool, page_tokens) else None
    if library is None or query.shape[1] > MOST_GROUP * head_tier.shape[0]:
        fallback.attention(out, query, pool, *rest)
        return
    query = query if aligned(query, 16) else query.contiguous()
    target = out if aligned(out, 4) else torch.empty_like(query)
    library.attention(target, query, pool, step, *scoring)
    if target is not out:
        used = query_start_loc[-1:].expand(out.shape[0]) > torch.arange(out.shape[0], device=out.device)
        out.copy_(torch.where(used[:, None, None], target, out))


@cache
def launch() -> str:
    """How steps of one new token a request are launched, as this process was told when it first asked."""
    return decode_launch()


def append_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    *rest: Any,
) -> None:
    """``tangram::ragged_append_attention`` on a GPU; the arguments are those of its schema.

    One launch where no request has more than one new token, if the kernel takes it as it is given.
    """
    step = rest[:10]
    scoring, max_query = _with_defaults(*rest[10:])
    if (
        max_query == 1
        and launch() != "separate"
        and query.shape[1] <= MOST_DECODE_GROUP * key.shape[1]
        and fits(pool, step[6])
        and all(aligned(tensor, 4) for tensor in (out, query))
        and all(aligned(tensor, 16) for tensor in (key, value))
        and (library := native(pool.device, pool.dtype, query.shape[2])) is not None
    ):
        library.decode(out, query, key, value, pool, step, scoring, launch())
        return
    append(key, value, pool, *step)
    attention(out, query, pool, *rest)


def seal(
    pool: torch.Tensor,
    rows: torch.Tensor,
    due: torch.Tensor,
    tier_offset: torch.Tensor,
    tier_heads: torch.Tensor,
    page_tokens: int,
    ring_slots: int,
    chunk: int,
    window: int,
    sink: int,
    scores: torch.Tensor | None = None,
    head_tier: torch.Tensor | None = None,
    head_member: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
    values: bool = False,
    asked: torch.Tensor | None = None,
) -> None:
    """``tangram::ragged_seal`` on a GPU."""
    layer = (head_tier, head_member, staged, origin)
    geometry = (page_tokens, ring_slots, chunk, window)
    taken = fits(pool, page_tokens) and chunk <= MOST_CHUNK
    library = native(pool.device, pool.dtype, pool.shape[3] // 2) if taken else None
    if library is None:
        tables = (rows, due, tier_offset, tier_heads)
        fallback.seal(pool, *tables, *geometry, sink, scores, *layer, values, asked)
    else:
        library.seal(pool, rows, due, tier_offset, tier_heads, geometry, sink, scores, layer, values, asked)


def stage(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, *rest: Any
) -> None:
    """``tangram::ragged_stage`` on a GPU; the arguments are those of ``kernels.fallback``."""
    tables, geometry, plan, buffers = rest[:4], rest[4:8], rest[8:11], rest[11:15]
    places, most = rest[15:17], rest[17:]
    library = native(pool.device, pool.dtype, query.shape[2]) if fits(pool, geometry[0]) else None
    if library is None:
        fallback.stage(query, key, value, pool, *rest)
        return
    query, key, value = (t if aligned(t, 16) else t.contiguous() for t in (query, key, value))
    library.stage(query, key, value, pool, tables, geometry, plan, buffers, places, most)


def unpack(out: torch.Tensor, *rest: Any) -> None:
    """``tangram::ragged_unpack`` on a GPU; the arguments are those of ``kernels.fallback``."""
    library = native(out.device, out.dtype, out.shape[2]) if aligned(out, 16) else None
    if library is None:
        fallback.unpack(out, *rest)
    else:
        library.unpack(out, *rest)


def _with_defaults(
    scale: float,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    max_query: int = 0,
    singles: bool = True,
) -> tuple[Scoring, int]:
    """Attention's scoring and ``max_query``: the dispatcher leaves out defaults at the end."""
    del singles
    return (scale, sinks, soft_cap), max_query


def fits(pool: torch.Tensor, page_tokens: int) -> bool:
    """Whether pages hold whole units of 16 tokens and are aligned to the copies' 16 bytes."""
    return page_tokens % 16 == 0 and aligned(pool, 16)


def aligned(tensor: torch.Tensor, size: int) -> bool:
    """Whether a tensor's rows begin at multiples of so many bytes."""
    item = tensor.element_size()
    return tensor.data_ptr() % size == 0 and all(stride * item % size == 0 for stride in tensor.stride()[:-1])
