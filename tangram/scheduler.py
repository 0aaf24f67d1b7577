"""vLLM's scheduler with one more rule: no step crosses a seal boundary."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from tangram.control import ControlServer, socket_path
from tangram.errors import UnsupportedError
from tangram.manager import RaggedManager

logger = init_logger(__name__)


class TangramScheduler(AsyncScheduler):
    """Clips prefill steps, counts preemptions, and answers the endpoints' questions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], RaggedManager):
            raise UnsupportedError(
                "this model's layers do not all use the ragged cache (sliding-window, MLA, Mamba and "
                "encoder-decoder models are not supported), or the attention backend is not Tangram's: "
                "start the engine with `tangram serve`"
            )
        parallel = self.vllm_config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise UnsupportedError("tensor and pipeline parallelism cannot be used with the ragged cache yet")
        if self.num_spec_tokens:
            raise UnsupportedError("speculative decoding cannot be used with the ragged cache yet")
        if self.connector is not None:
            raise UnsupportedError("KV connectors cannot be used with the ragged cache")
        self.manager: RaggedManager = managers[0]
        self.manager.headroom = self.kv_cache_manager.watermark_blocks
        self.preemptions = 0
        # Held while a step is planned or settled, and while the socket's calls look or evict.
        self._lock = threading.RLock()
        # vLLM asks `_mamba_block_aligned_split` where a step may end; our reason differs, the need does not.
        self.need_mamba_block_aligned_split = True
        self._control = ControlServer(
            socket_path(self.vllm_config.instance_id),
            {"memory": self._memory, "ping": lambda _: {}, "evict": self._evict},
        )

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Clip a step at the next seal boundary."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return min(num_new_tokens, self.manager.geometry.next_boundary(start) - start)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Also drops the idle conversations, whose pages would keep vLLM from resetting; those too that vLLM
        makes idle by preempting what runs."""
        with self._lock, self.manager.keeping_nothing():
            self.manager.evict_all()
            return super().reset_prefix_cache(*args, **kwargs)

    def shutdown(self) -> None:
        """Stop answering, then vLLM's own."""
        self._control.close()
        super().shutdown()

    def _memory(self, _: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            snapshot = self.manager.snapshot()
            snapshot.counters["preemptions"] = self.preemptions
            snapshot = replace(snapshot, running=len(self.running), waiting=len(self.waiting))
        return snapshot.to_dict()

    def _evict(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            rows = [
                row
                for row in self.manager.resident.rows()
                if asked.get("all")
                or row.name == asked.get("sequence")
                or now - row.since >= asked.get("idle_seconds", math.inf)
            ]
            conversations, pages = self.manager.evict(rows)
        return {"conversations": conversations, "pages": pages}

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        with self._lock:
            return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        with self._lock:
            return super().update_from_output(*args, **kwargs)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        with self._lock:
            return super().finish_requests(*args, **kwargs)
