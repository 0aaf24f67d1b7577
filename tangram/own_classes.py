"""Whether an engine uses our scheduler and our worker, which the backend cannot do without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from tangram.plugin import CPU_WORKER, SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.tangram")  # vLLM shows what is logged below its own name only


def other_scheduler(vllm: VllmConfig) -> bool:
    """Whether the steps are planned by a scheduler that does not know of seal boundaries."""
    return not _is_ours(vllm.scheduler_config.scheduler_cls, SCHEDULER)


def warn_of_other_worker(vllm: VllmConfig) -> None:
    """Say once in a process what a CPU engine without our worker cannot do."""
    if vllm.device_config.device_type == "cpu" and not _is_ours(vllm.parallel_config.worker_cls, CPU_WORKER):
        logger.warning_once(
            "without --worker-cls %s a request with a seed ends the engine when its prompt is cut, and a "
            "request without a LoRA adapter is answered with its neighbour's",
            CPU_WORKER,
        )


def _is_ours(asked: Any, ours: str) -> bool:
    """Whether a class, or the name of one, is ours or derived from it."""
    if asked == ours:
        return True
    given = resolve_obj_by_qualname(asked) if isinstance(asked, str) and "." in asked else asked
    return isinstance(given, type) and issubclass(given, resolve_obj_by_qualname(ours))
