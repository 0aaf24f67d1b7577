"""vLLM's scheduler with one more rule: where a step may end (see :meth:`RaggedManager.step_end`)."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from tangram.config import TangramConfig
from tangram.control import ControlServer, socket_path
from tangram.crowd import Crowd
from tangram.engines import own_instance
from tangram.errors import ConfigError, UnsupportedError
from tangram.hybrid import Windows
from tangram.manager import RaggedManager
from tangram.pins import set_pin
from tangram.reasons import told
from tangram.room import Policy
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
            self.manager = self._find_managers()
            self._check_capacity()
        self.preemptions = 0
        self._crowd = Crowd(self.manager, self.requests)
        if self.manager.room.policy.returning_first:
            self.manager.defers = self._crowd.defers
        # vLLM asks `_mamba_block_aligned_split` where a step may end; our reason differs, the need does not.
        self.need_mamba_block_aligned_split = True
        # The control server's thread looks into what the scheduler's thread changes.
        self._lock = threading.RLock()
        self._control = ControlServer(
            socket_path(own_instance(self.vllm_config)),
            {"memory": self._memory, "evict": self._evict, "pin": self._pin, "ping": lambda _: {}},
        )

    def _find_managers(self) -> RaggedManager:
        """Our manager, told how to do its work and who stands beside it."""
        coordinator = self.kv_cache_manager.coordinator
        own = [m for m in coordinator.single_type_managers if isinstance(m, RaggedManager)]
        others = [m for m in coordinator.single_type_managers if not isinstance(m, RaggedManager)]
        if len(own) != 1 or any(type(manager) is not SlidingWindowManager for manager in others):
            raise UnsupportedError(
                "this model has layers that use neither the ragged cache nor a sliding window, or the "
                "attention backend is not Tangram's: start the engine with `tangram serve`, and models with "
                "other layers with stock vLLM"
            )
        manager = own[0]
        config = TangramConfig.from_additional_config(self.vllm_config.additional_config)
        policy = Policy(
            reserve=config.reserve,
            resident_share=config.resident_share,
            observed=config.observed,
            headroom=self.kv_cache_manager.watermark_blocks,
            returning_first=config.returning_first,
            wide=config.steps_wide(current_platform.is_cuda()),
        )
        manager.configure(policy)
        if others:
            manager.room.windows = Windows.of(coordinator, manager.resident.furthest_back())
        manager.final_length = self._final_length
        return manager

    def _check_capacity(self) -> None:
        """One conversation of the greatest length must fit, or it would wait for ever."""
        pages = self.manager.block_pool.num_gpu_blocks - 1
        needed = self.manager.geometry.pages(self.max_model_len)
        needed += self.manager.windows.most(self.max_model_len)
        if needed > pages:
            raise ConfigError(
                "max_model_len",
                f"a conversation of {self.max_model_len} tokens takes {needed} pages and the KV cache "
                f"has {pages}: lower --max-model-len, or give the KV cache more memory",
            )
        self.manager.room.policy = replace(self.manager.room.policy, pinnable=pages - needed)

    def _final_length(self, request_id: str) -> int:
        """Tokens that a request holds when it has generated all that it may; drafts go beyond its last."""
        request = self.requests.get(request_id)
        if request is None:
            return 0
        return min(request.num_prompt_tokens + request.max_tokens + self.num_spec_tokens, self.max_model_len)

    # ---- vLLM's own steps, one at a time ------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; when it is crowded, conversations that return go first."""
        with self._lock:
            if self.manager.room.policy.returning_first:
                self._crowd.arrange(self.waiting)
                self.manager.counters["crowded_steps"] += self._crowd.crowded
            return super().schedule(*args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._lock:
            return super().update_from_output(*args, **kwargs)

    def add_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; the manager learns who is back, and who began another conversation."""
        with self._lock:
            super().add_request(request, *args, **kwargs)
            self.manager.arrived(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        with self._lock:
            return super().finish_requests(*args, **kwargs)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Clip a step."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return self.manager.step_end(request, start, start + num_new_tokens) - start

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Also drops the idle conversations, whose pages would keep vLLM from resetting; those too that vLLM
        makes idle by preempting what runs."""
        with self._lock, self.manager.keeping_nothing():
            self.manager.evict()
            return super().reset_prefix_cache(*args, **kwargs)

    def shutdown(self) -> None:
        """Stop answering, then vLLM's own."""
        self._control.close()
        super().shutdown()

    # ---- what the endpoints ask ---------------------------------------------------------------------------

    def _memory(self, _: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            occupancy = self.manager.occupancy()
            occupancy.counters["preemptions"] = self.preemptions
            running, waiting = self.get_request_counts()
        return occupancy.snapshot(self.manager.geometry, running, waiting).to_dict()

    def _evict(self, call: dict[str, Any]) -> dict[str, Any]:
        """Drop one idle row, those idle for a while, or all; a pinned one only by its name."""
        with self._lock:
            latest = time.monotonic() - float(call.get("idle_seconds", math.inf))
            rows = [
                row
                for row in self.manager.resident.rows()
                if row.name == call.get("sequence")
                or (not row.pinned and (call.get("all") or row.since <= latest))
            ]
            conversations, pages = self.manager.evict(rows)
        return {"conversations": conversations, "pages": pages}

    def _pin(self, call: dict[str, Any]) -> dict[str, Any]:
        """Keep a conversation when room is made, or let it go."""
        with self._lock:
            return set_pin(self.manager, str(call["sequence"]), bool(call["pinned"]))
