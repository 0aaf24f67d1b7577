"""vLLM's scheduler with one more rule: no step crosses a seal boundary."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from tangram.control import ControlServer, socket_path
from tangram.errors import UnsupportedError
from tangram.hybrid import Windows
from tangram.manager import RaggedManager

logger = init_logger(__name__)


class TangramScheduler(AsyncScheduler):
    """Clips prefill steps, counts preemptions, and answers the endpoints' questions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        own = [m for m in coordinator.single_type_managers if isinstance(m, RaggedManager)]
        others = [m for m in coordinator.single_type_managers if not isinstance(m, RaggedManager)]
        if len(own) != 1 or any(type(manager) is not SlidingWindowManager for manager in others):
            raise UnsupportedError(
                "this model has layers that use neither the ragged cache nor a sliding window (MLA, Mamba "
                "and encoder-decoder models are not supported), or the attention backend is not Tangram's: "
                "start the engine with `tangram serve`"
            )
        parallel = self.vllm_config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise UnsupportedError("tensor and pipeline parallelism cannot be used with the ragged cache yet")
        if self.num_spec_tokens:
            raise UnsupportedError("speculative decoding cannot be used with the ragged cache yet")
        if self.connector is not None:
            raise UnsupportedError("KV connectors cannot be used with the ragged cache")
        self.manager: RaggedManager = own[0]
        if others:
            self.manager.windows = Windows.of(coordinator, self.manager.geometry)
        self.manager.headroom = self.kv_cache_manager.watermark_blocks
        self.preemptions = 0
        # vLLM asks `_mamba_block_aligned_split` where a step may end; our reason differs, the need does not.
        self.need_mamba_block_aligned_split = True
        self._control = ControlServer(
            socket_path(self.vllm_config.instance_id), {"memory": self._memory, "ping": lambda _: {}}
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
        self.manager.evict_all()
        with self.manager.keeping_nothing():
            return super().reset_prefix_cache(*args, **kwargs)

    def shutdown(self) -> None:
        """Stop answering, then vLLM's own."""
        self._control.close()
        super().shutdown()

    def _memory(self, _: dict[str, Any]) -> dict[str, Any]:
        snapshot = self.manager.snapshot()
        snapshot.counters["preemptions"] = self.preemptions
        return snapshot.to_dict()
