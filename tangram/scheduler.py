"""vLLM's scheduler with one more rule: no step crosses a seal boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from tangram.control import ControlServer, socket_path
from tangram.errors import UnsupportedError
from tangram.manager import RaggedManager
from tangram.reasons import told
from tangram.support import check_supported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


class TangramScheduler(AsyncScheduler):
    """Clips prefill steps, counts preemptions, and answers the endpoints' questions."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        with told():
            check_supported(vllm_config)
            super().__init__(vllm_config, *args, **kwargs)
            managers = self.kv_cache_manager.coordinator.single_type_managers
            if len(managers) != 1 or not isinstance(managers[0], RaggedManager):
                raise UnsupportedError(
                    "not all of this model's layers use the ragged cache, because they are not all full "
                    "attention or because the attention backend is not Tangram's: start the engine with "
                    "`tangram serve`, and models with other layers with stock vLLM"
                )
        self.manager: RaggedManager = managers[0]
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
