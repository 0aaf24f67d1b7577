"""vLLM's real scheduler with our subclass and manager, on the simulated worker."""

from __future__ import annotations

import json
import warnings
from collections import deque
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from kernels.wide import staged_pages
    from tangram.plugin import register
    from tangram.runtime import kernel_layout
    from tangram.scheduler import TangramScheduler
    from tangram.spec import RaggedSpec

from tangram.config import TangramConfig
from tangram.geometry import Geometry, Tier
from tests.tangram.simulated_worker import SimulatedWorker, answer

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
GEOMETRY = Geometry(2, 2, 8, 4, 16, 64, 32, 32, 2, (Tier(16, ((0, 0), (1, 1))), Tier(48, ((0, 1), (1, 0)))))
_EVEN, _ODD = ((0, 0), (1, 1)), ((0, 1), (1, 0))
ODD_GEOMETRIES = (
    Geometry(2, 2, 8, 4, 16, 16, 32, 32, 2, (Tier(16, _EVEN), Tier(16, _ODD))),  # a chunk is a page
    Geometry(2, 2, 8, 4, 4, 32, 0, 4, 2, (Tier(4, _EVEN), Tier(20, _ODD))),  # no window, least rewind
    Geometry(2, 2, 8, 4, 8, 64, 40, 72, 4, (Tier(24, _EVEN + _ODD),)),  # one tier, rewind beyond a chunk
    Geometry(
        2,
        2,
        8,
        4,
        1,
        12,
        5,
        9,
        1,
        tuple(Tier(k, (h,)) for k, h in zip((1, 3, 7, 12), _EVEN + _ODD, strict=True)),
    ),
)
"""What settings at their limits lead to."""
SETTINGS = {"chunk": 64, "window": 32, "rewind": 32, "group_size": 2}


def vllm_config(folder: Path, max_model_len: int, settings: dict[str, Any], **engine: Any) -> VllmConfig:
    """vLLM's whole configuration for a tiny model that is never loaded."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    register()
    config = TangramConfig.from_mapping(SETTINGS | settings)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        block_size=GEOMETRY.page_tokens,
        enforce_eager=True,
        scheduler_cls=TangramScheduler,
        additional_config=json.loads(config.to_json()),
        **engine,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return arguments.create_engine_config()


class Simulation:
    """Requests in, answers out; ``step`` schedules one step and delivers the output of an earlier one.

    Args:
        depth: steps in flight, as with async scheduling (2) or without (1).
    """

    def __init__(self, config: VllmConfig, pages: int, depth: int = 2, geometry: Geometry = GEOMETRY) -> None:
        init_none_hash(sha256)
        spec = RaggedSpec(
            block_size=geometry.page_tokens,
            num_kv_heads=2,
            head_size=8,
            dtype=torch.float32,
            num_head_slots=1,
            state_content_bytes=geometry.state_bytes,
            geometry=geometry,
        )
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
        cache = KVCacheConfig(pages + 1, [], [KVCacheGroupSpec(names, spec)])
        config.cache_config.num_gpu_blocks = pages + 1
        self.scheduler = TangramScheduler(
            config, cache, StructuredOutputManager(config), geometry.page_tokens, geometry.page_tokens
        )
        self.manager = self.scheduler.manager
        self.pages = pages
        self.depth = depth
        self.salts: dict[str, str] = {}
        room = staged_pages(
            kernel_layout(geometry), self.scheduler.max_num_scheduled_tokens, geometry.least_wide
        )
        self.worker = SimulatedWorker(geometry, self.salts, room if self.manager.room.policy.wide else 0)
        self.flying: deque[tuple[Any, Any]] = deque()
        self.prompts: dict[str, tuple[list[int], str, int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.handed_out: set[int] = set()
        self._watch_pool()
        self._hasher = get_request_block_hasher(geometry.page_tokens, sha256)

    def add(self, name: str, prompt: list[int], count: int, salt: str | None = "me") -> None:
        """Ask for ``count`` tokens."""
        self.salts[name] = salt or ""
        self.prompts[name] = (list(prompt), salt or "", count)
        self.outputs[name] = []
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        request = Request(name, list(prompt), params, None, cache_salt=salt, block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """As when the client goes away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "abort"

    def step(self) -> bool:
        """Whether anything happened."""
        output = self.scheduler.schedule()
        self.manager.check_integrity()
        for new in output.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        if output.total_num_scheduled_tokens:
            self.flying.append((output, self.worker.execute(output, self.handed_out)))
            self.handed_out = set()
        delivered = bool(self.flying) and (
            len(self.flying) >= self.depth or not output.total_num_scheduled_tokens
        )
        if delivered:
            self.deliver(*self.flying.popleft())
        return bool(output.total_num_scheduled_tokens) or delivered

    def deliver(self, output: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        self.manager.check_integrity()

    def _watch_pool(self) -> None:
        pool = self.manager.block_pool
        hand_out = pool.get_new_blocks

        def recorded(count: int) -> Any:
            blocks = hand_out(count)
            self.handed_out.update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = recorded  # type: ignore[method-assign]

    def run(self, most: int = 100_000) -> None:
        """Until all is answered; a scheduler that makes no progress fails."""
        idle = 0
        while self.scheduler.has_unfinished_requests() or self.flying:
            idle = 0 if self.step() else idle + 1
            assert idle < 5, "requests wait and nothing happens"
            most -= 1
            assert most > 0, "requests never end"

    def expected(self, name: str) -> list[int]:
        """What the simulated model answers."""
        prompt, salt, count = self.prompts[name]
        return answer(prompt, salt, count)

    def close(self) -> None:
        """All answered, nothing lost, and give the control socket back."""
        for name, reason in self.finished.items():
            got = self.outputs[name]
            assert got == self.expected(name)[: len(got)], name
            assert reason == "abort" or len(got) == self.prompts[name][2], name
        self.manager.evict()
        assert self.manager.block_pool.get_num_free_blocks() == self.pages
        self.scheduler.shutdown()
