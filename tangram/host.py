"""What a CPU host can spare for the cache. On a GPU vLLM measures this itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

GIB = 1 << 30
SHARE = 0.25
"""Of the memory that is free at start. The model, the app and the page cache need the rest."""

LEAST, MOST = GIB // 4, 16 * GIB


def available_memory() -> int:
    """Bytes that this process could still use: free memory, or what its container leaves if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def cpu_cache_bytes(ranks: int = 1) -> int:
    """Bytes of KV cache to ask for on a CPU, for each rank, when nobody chose: vLLM's own default, 92% of the
    machine, leaves no room for anything else and fails where anything else runs."""
    return max(LEAST, min(MOST, int(available_memory() * SHARE) // ranks))


def cpu_threads(ranks: int, cpus: Sequence[int], nodes: int) -> str | None:
    """``VLLM_CPU_OMP_THREADS_BIND`` for so many ranks: by itself vLLM gives each a memory node of its own,
    and ends where there are fewer. None where its own choice works.

    Args:
        cpus: those that this process may use.
        nodes: of memory.
    """
    if ranks <= nodes:
        return None
    each = len(cpus) // ranks
    if not each:
        return "nobind"
    shares = (cpus[rank * each : (rank + 1) * each] for rank in range(ranks))
    return "|".join(",".join(map(str, share)) for share in shares)


def memory_nodes() -> int:
    """Of this machine; 1 where it does not tell."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
