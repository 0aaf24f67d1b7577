"""Entry point ``vllm.general_plugins``: runs once in every vLLM process."""

from __future__ import annotations

import os

ENABLE_VARIABLE = "TANGRAM"
"""Set to 1 by ``tangram serve``. vLLM on a CPU knows one backend only, so there ours takes its place, and
must not do so in an engine that never asked for it."""

BACKEND = "tangram.backend.RaggedBackend"
CPU_WORKER = "tangram.cpu_worker.TangramCPUWorker"
SCHEDULER = "tangram.scheduler.TangramScheduler"


def register() -> None:
    """Make the backend, the cache spec and its manager known to vLLM. Safe to call again."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from tangram.manager import RaggedManager
    from tangram.spec import RaggedSpec

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if os.environ.get(ENABLE_VARIABLE) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    # Without this the first lookup would find our entry and never register vLLM's own.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RaggedSpec, RaggedManager, RaggedSpec)
