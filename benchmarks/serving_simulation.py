"""What `gpu_serving.py` would show, in seconds of a CPU: the real schedulers and caches in simulated time.

    python benchmarks/serving_simulation.py [--engines stock "tangram 0.25"] [--clients 16 20 54 60 98]
        [--kv-gib 16] [--seconds 40] [--thinking 1.0] [--crowd CALM=0.5 PATIENCE=5] [--json FILE]

Closed-loop clients (`clients.Workload`) talk to vLLM's own scheduler with this project's cache manager, or
its own for stock vLLM. No model runs: a step takes as long as a model of its time says, whose parameters are
those of an H200 (see ``StepTime``), and two steps are in flight as with async scheduling. For rules of
admission and eviction, to be tried before a GPU is; no figure from here is a measurement of a GPU.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.clients import Turn, Workload
from benchmarks.engines import (
    ENGINES,
    MODEL,
    engine_name,
    geometry_of,
    kv_bytes,
    parts_of,
    plugin_options,
    write_json,
    write_model,
)
from benchmarks.summary import summarise

BLOCK = 16
STEP_TOKENS, STEP_REQUESTS = 8192, 256
"""vLLM's defaults for a server on an H200."""
TOKEN = 7
"""What every answer consists of."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, from `benchmarks/gpu_steps.py` and `gpu_prompts.py` on an H200 (Qwen3-4B's shape).

    Attributes:
        rest: what is not attention and does not depend on the batch.
        request: for each request that decodes.
        bandwidth: bytes of keys and values read in a second.
        prefill: prompt tokens read in a second.
    """

    rest: float = 0.0036
    request: float = 12e-6
    bandwidth: float = 4.0e12
    prefill: float = 57_000.0

    def __call__(self, decoding: int, cached_bytes: float, prompt_tokens: int) -> float:
        return (
            self.rest
            + decoding * self.request
            + cached_bytes / self.bandwidth
            + prompt_tokens / self.prefill
            + (0.001 if prompt_tokens > 1024 else 0.0)
        )


PREFILL = {None: 57_000.0, 1.0: 56_500.0, 0.5: 62_000.0, 0.25: 67_000.0}
"""Prompt tokens a second in prompts of 8,192, by retention (None: stock vLLM)."""


class Engine:
    """A scheduler and its cache, without a model.

    Args:
        engine: a name, see ``engines.parts_of``.
        folder: has the model's configuration and profile.
    """

    def __init__(self, engine: str, folder: Path, kv_gib: float, max_model_len: int) -> None:
        self.retention, settings = parts_of(engine)
        if self.retention:
            settings.setdefault("wide_steps", "on")
        options = plugin_options(self.retention, str(folder / "profile.json"), **settings)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        if self.retention:
            from tangram.plugin import register
            from tangram.scheduler import TangramScheduler as Scheduler

            register()
            options["scheduler_cls"] = Scheduler
        else:
            Scheduler = AsyncScheduler  # type: ignore[misc]
        options.setdefault("block_size", BLOCK)
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            enforce_eager=True,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=STEP_REQUESTS,
            enable_prefix_caching=True,
            **options,
        ).create_engine_config()
        heads = {"num_kv_heads": MODEL["num_key_value_heads"], "head_size": MODEL["head_dim"]}
        shape: dict[str, Any] = {**heads, "dtype": torch.bfloat16}
        if self.retention:
            spec, page_bytes = self._ragged(config, shape, max_model_len)
        else:
            spec, page_bytes = FullAttentionSpec(block_size=BLOCK, **shape), BLOCK * kv_bytes(MODEL)
        layers = [
            f"model.layers.{layer}.self_attn.attn" for layer in range(int(str(MODEL["num_hidden_layers"])))
        ]
        pages = int(kv_gib * 2**30 / page_bytes)
        config.cache_config.num_gpu_blocks = pages
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(pages, [], [KVCacheGroupSpec(layers, spec)]),
            StructuredOutputManager(config),
            BLOCK,
            BLOCK,
        )
        self.step_time = StepTime(prefill=PREFILL[self.retention])
        self._kept_bytes = kv_bytes(MODEL) * (self.retention or 1.0)
        self.now = 1000.0
        if self.retention:
            self.scheduler._crowd._clock = lambda: self.now
            self.scheduler.manager.resident._clock = lambda: self.now
        self._flying: deque[Any] = deque()
        self._known: dict[str, list[int]] = {}  # request: tokens; computed; cached

    def _ragged(self, config: Any, shape: dict[str, Any], max_model_len: int) -> tuple[Any, int]:
        from tangram.config import TangramConfig
        from tangram.spec import RaggedSpec

        own = TangramConfig.from_additional_config(config.additional_config)
        geometry = geometry_of(own, MODEL, max_model_len)
        spec = RaggedSpec(
            block_size=geometry.page_tokens,
            num_head_slots=1,
            state_content_bytes=geometry.state_bytes,
            geometry=geometry,
            **shape,
        )
        return spec, geometry.page_bytes

    def ask(self, name: str, prompt: list[int], count: int, user: str) -> None:
        """A request arrives now."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        request = Request(
            name,
            prompt,
            params,
            None,
            cache_salt=user,
            block_hasher=self.hasher,
            arrival_time=self.now,
        )
        self._known[name] = [len(prompt), 0, 0]
        self.scheduler.add_request(request)

    def step(self) -> Iterator[tuple[str, int, int, bool]]:
        """Schedule a step, let its time pass, and deliver an earlier one: request, new tokens, tokens of its
        prompt that were cached, whether it has ended."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self._known[new.req_id][1:] = [new.num_computed_tokens] * 2
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._known[name][1] = computed
        counts = output.num_scheduled_tokens
        if counts:
            self._flying.append(output)
            decoding = [name for name, count in counts.items() if count == 1]
            read = sum(self._known[name][1] for name in decoding) * self._kept_bytes
            self.now += self.step_time(len(decoding), read, sum(counts.values()) - len(decoding))
        elif not self._flying:
            self.now += 0.001
        if self._flying and (len(self._flying) >= 2 or not counts):
            yield from self._deliver(self._flying.popleft())

    def _deliver(self, output: Any) -> Iterator[tuple[str, int, int, bool]]:
        from vllm.v1.outputs import ModelRunnerOutput

        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            known = self._known[name]
            known[1] += output.num_scheduled_tokens[name]
            complete = known[1] >= known[0]
            known[0] += complete
            sampled.append([TOKEN] if complete else [])
        index = {name: position for position, name in enumerate(names)}
        result = ModelRunnerOutput(names, index, sampled_token_ids=sampled)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                ended = one.finish_reason is not None
                yield one.request_id, len(one.new_token_ids), self._known[one.request_id][2], ended
                if ended:
                    del self._known[one.request_id]


class Clients:
    """Closed-loop clients of one engine, as ``clients.converse`` has them."""

    def __init__(self, workload: Workload, engine: Engine, count: int) -> None:
        self._workload, self._engine = workload, engine
        self.log: list[Turn] = []
        self._open: dict[str, Turn] = {}
        self._conversation = dict.fromkeys(range(count), 0)
        self._history: dict[int, list[int]] = {}
        self._due: list[tuple[float, int, int]] = []
        for client in range(count):
            heapq.heappush(self._due, (engine.now + client / count * 2.0, client, workload.entry(client)))

    def until(self, end: float) -> None:
        """Let them talk until then."""
        while self._engine.now < end:
            while self._due and self._due[0][0] <= self._engine.now:
                self._ask(*heapq.heappop(self._due)[1:])
            for name, tokens, cached, ended in self._engine.step():
                turn = self._open[name]
                if tokens:
                    turn.parts.append((self._engine.now, tokens))
                turn.cached = cached
                if ended:
                    turn.ended = self._engine.now
                    self._think(self._open.pop(name))

    def _ask(self, client: int, number: int) -> None:
        workload, conversation = self._workload, self._conversation[client]
        joining = number > 0 and client not in self._history
        if client not in self._history:
            first = workload.first_length(client, conversation)
            self._history[client] = workload.tokens(client, conversation, 0, first)
            if joining:
                more = number * (workload.answer + workload.message)
                self._history[client] += workload.tokens(client, conversation, workload.turns, more)
        else:
            self._history[client] += workload.tokens(client, conversation, number, workload.message)
        prompt = list(self._history[client])
        turn = Turn(client, number, len(prompt), self._engine.now, joining)
        self.log.append(turn)
        name = str(len(self.log))
        self._open[name] = turn
        self._engine.ask(name, prompt, workload.answer, f"client {client}")

    def _think(self, turn: Turn) -> None:
        client, conversation = turn.client, self._conversation[turn.client]
        due = self._engine.now + self._workload.thought(client, conversation, turn.number)
        self._history[client] += [TOKEN] * self._workload.answer
        following = turn.number + 1
        if following == self._workload.turns:
            self._conversation[client], following = conversation + 1, 0
            del self._history[client]
        heapq.heappush(self._due, (due, client, following))


def simulate(
    engine: str,
    folder: Path,
    workload: Workload,
    clients: int,
    kv_gib: float,
    warmup: float,
    seconds: float,
    max_model_len: int = 16384,
) -> dict[str, Any]:
    """Figures as ``summary.summarise`` has them."""
    simulated = Engine(engine, folder, kv_gib, max_model_len)
    try:
        talking = Clients(workload, simulated, clients)
        begin = simulated.now + warmup
        talking.until(begin + seconds)
        return {"engine": engine, "clients": clients} | summarise(talking.log, begin, simulated.now)
    finally:
        simulated.scheduler.shutdown()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), type=engine_name)
    parser.add_argument("--clients", nargs="+", type=int, default=[16, 20, 54, 60, 98])
    parser.add_argument("--kv-gib", type=float, default=16.0, help="GiB of KV cache")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured, for each number of clients")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds before")
    parser.add_argument("--thinking", type=float, default=1.0, help="mean seconds between turns")
    parser.add_argument(
        "--crowd", nargs="+", default=[], metavar="NAME=VALUE", help="constants of tangram/crowd.py"
    )
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if arguments.crowd:
        from tangram import crowd

        for name, value in (pair.split("=", 1) for pair in arguments.crowd):
            if not hasattr(crowd, name):
                parser.error(f"tangram/crowd.py has no {name}")
            setattr(crowd, name, float(value))
    workload = Workload(thinking=arguments.thinking)
    rows = []
    columns = ("clients", "turns/s", "TTFT p50", "TTFT p99", "ITL p50", "hits", "waiting")
    print(f"{'engine':<24}" + "".join(f"{column:>10}" for column in columns))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), False)
        for engine in arguments.engines:
            for clients in arguments.clients:
                row = simulate(
                    engine,
                    Path(folder),
                    workload,
                    clients,
                    arguments.kv_gib,
                    arguments.warmup,
                    arguments.seconds,
                )
                rows.append(row)
                ttft, itl = (row[name] or {"p50": math.nan, "p99": math.nan} for name in ("ttft", "itl"))
                print(
                    f"{engine:<24}{clients:>10}{row['turns_per_second']:>10.1f}{ttft['p50']:>10.3f}"
                    f"{ttft['p99']:>10.2f}{1e3 * itl['p50']:>10.1f}{row['hit_rate'] or 0:>10.0%}"
                    f"{row['waiting_at_end']:>10}",
                    flush=True,
                )
    write_json(arguments.json, "serving_simulation", vars(arguments), points=rows)


if __name__ == "__main__":
    main()
