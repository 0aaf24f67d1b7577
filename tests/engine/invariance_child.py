"""One engine of random weights at a quarter retention, and one conversation run through it in every way.

    python invariance_child.py MODEL_FOLDER RESULT.json

Every page that is handed out is filled with NaN first, so that a slot which is read before it is written
shows in all that follows. For each run it records what was generated, what was resumed, and which positions
every tier kept of each sealed chunk.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

SETTINGS = {"retention": 0.25, "chunk": 64, "window": 32, "rewind": 32, "group_size": 2}
LENGTH = 480
TURNS = [(150, 40), (70, 30), (90, 40)]  # tokens that are new, tokens that are generated
PAGES = 470  # ten conversations of LENGTH
FEW_PAGES = 120  # two and a half


def text(name: str, turn: int, count: int) -> list[int]:
    rng = random.Random(f"{name}{turn}")
    return [rng.randrange(3, 400) for _ in range(count)]


class Driver:
    """The engine, one step at a time, and what it keeps."""

    def __init__(self, folder: str) -> None:
        from tangram.config import TangramConfig

        config = TangramConfig.from_mapping(SETTINGS)
        warnings.simplefilter("ignore")
        from vllm import LLM

        self.llm = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=LENGTH,
            num_gpu_blocks_override=PAGES,
            block_size=config.page_tokens,
            scheduler_cls="tangram.scheduler.TangramScheduler",
            worker_cls="tangram.cpu_worker.TangramCPUWorker",
            additional_config=json.loads(config.to_json()),
        )
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.manager
        self.budget = self.scheduler.max_num_scheduled_tokens
        self.kept: dict[str, dict[int, list[Any]]] = {}
        self.pool: Any = None
        self.builder: Any = None
        self._serial = 0
        self._record()

    def _record(self) -> None:
        """Note what sealing keeps, and poison what is handed out."""
        from tangram import backend, sealer, sealing

        seal_chunk, select, build = sealer.seal_chunk, sealing.select, backend.RaggedMetadataBuilder.build
        chosen: list[Any] = []

        def recorded_select(*args: Any) -> Any:
            chosen.append(select(*args))
            return chosen[-1]

        def recorded_seal(pool: Any, row: Any, geometry: Any, chunk: int, *rest: Any) -> None:
            chosen.clear()
            seal_chunk(pool, row, geometry, chunk, *rest)
            (name,) = (n for n, r in self.manager.req_to_blocks.items() if r[0].block_id == int(row[0]))
            name = name.rpartition("-")[0]  # vLLM makes request ids unique by a suffix
            self.kept[name][chunk] = [positions.tolist() for positions in chosen]

        def watched_build(builder: Any, *args: Any, **kwargs: Any) -> Any:
            self.builder, self.pool = builder, builder.pool()
            return build(builder, *args, **kwargs)

        sealing.select, sealer.seal_chunk = recorded_select, recorded_seal
        backend.RaggedMetadataBuilder.build = watched_build
        hand_out = self.manager.block_pool.get_new_blocks

        def poisoned(count: int) -> Any:
            blocks = hand_out(count)
            if self.pool is not None:
                self.poison([block.block_id for block in blocks])
            return blocks

        self.manager.block_pool.get_new_blocks = poisoned

    def poison(self, pages: list[int]) -> None:
        """Whoever reads these before they are written gets NaN."""
        import torch

        with torch.inference_mode():
            self.pool[pages] = float("nan")

    @contextmanager
    def steps_of(self, budget: int) -> Iterator[None]:
        """Cut prompts into steps of so many tokens."""
        self.scheduler.max_num_scheduled_tokens = budget
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = self.budget

    def ask(self, requests: dict[str, tuple[list[int], int]], after: int = 0) -> dict[str, dict[str, Any]]:
        """Run requests together, each (prompt, tokens to generate); the later ones start ``after`` steps."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        waiting, steps, outputs = list(requests), 0, {}
        while waiting or engine.has_unfinished_requests():
            while waiting and (steps >= after or len(waiting) == len(requests)):
                name = waiting.pop(0)
                prompt, count = requests[name]
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                self.kept[name] = {}
                engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": "me"}, params)
                if after:
                    break
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            steps += 1
        return {
            name: {
                "answer": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "kept": self.kept[name],
            }
            for name, output in outputs.items()
        }

    def forget(self) -> None:
        self.manager.evict()

    @contextmanager
    def pages_left(self, pages: int) -> Iterator[None]:
        """A pool that is smaller, by pages that nobody's books know of."""
        pool, self.manager._check = self.manager.block_pool, False
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - pages)
        yield
        pool.free_blocks(taken)
        self.manager._check = True

    def conversation(
        self, names: list[str], forget: bool = False, watched: str = "a"
    ) -> list[dict[str, Any]]:
        """All turns of conversations, together. The turns of the one that is watched are returned."""
        self._serial += 1
        contexts: dict[str, list[int]] = {name: [] for name in names}
        turns = []
        for turn, (new, count) in enumerate(TURNS):
            if forget:
                self.forget()
            for name in names:
                contexts[name] += text(name, turn, new)
            ids = {name: f"{name}-{self._serial}-{turn}" for name in names}
            answers = self.ask({ids[name]: (list(contexts[name]), count) for name in names})
            for name in names:
                contexts[name] += answers[ids[name]]["answer"]
            turns.append(answers[ids[watched]])
        self.states = self.sealed_states(ids[watched])
        self.forget()
        return turns

    def sealed_states(self, name: str) -> Any:
        """Keys and values of all sealed chunks of an idle conversation, in the order of its row."""
        geometry = self.manager.geometry
        (row,) = (row for row in self.manager.resident.rows() if row.name.rpartition("-")[0] == name)
        return self.pool[row.pages[geometry.ring_pages : geometry.pages(row.tokens)]].clone()

    @contextmanager
    def wide(self) -> Iterator[None]:
        """Steps may cross seal boundaries."""
        policy = self.manager.room.policy
        self.manager.room.policy = replace(policy, wide=True)
        try:
            yield
        finally:
            self.manager.room.policy = policy

    def expect_queries(self) -> None:
        """From now on what heads are asked on average counts, too."""
        import torch

        from tangram.mean_queries import Asked, MeanQueries
        from tangram.scorers import get_scorer

        sealer = self.builder.sealer
        sealer.scorer, g = get_scorer("keyvalue_query"), sealer.geometry
        draw = torch.Generator().manual_seed(7)
        means = torch.randn(g.layers, g.kv_heads, g.head_size, generator=draw)
        sealer.mean_queries = MeanQueries(means, None)
        sealer.asked = self.builder.wide.asked = Asked(sealer.mean_queries, g, sealer.ranks)


def main(folder: str) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_PLUGINS": "tangram", "TANGRAM": "1", "TANGRAM_CHECK_INTEGRITY": "1"}
    driver = Driver(folder)
    driver.ask({"first": ([5] * 20, 2)})
    driver.forget()
    driver.poison(list(range(1, PAGES)))
    result: dict[str, Any] = {"alone": driver.conversation(["a"])}
    states, apart = driver.states, {}
    with driver.wide():
        for names in (["a"], ["b", "a", "c"]):
            run = f"wide{len(names)}"
            result[run] = driver.conversation(names)
            apart[run] = float((driver.states - states).abs().max())
        for budget in (95, 96, 97, 100):  # the first boundary is at 96
            with driver.steps_of(budget):
                run = f"wide_by_{budget}"
                result[run] = driver.conversation(["a"], forget=True)
                apart[run] = float((driver.states - states).abs().max())
        result["wide_prefixes"] = prefixes(driver, "guide")
    result["apart"] = apart
    result["recomputed"] = driver.conversation(["a"], forget=True)
    with driver.steps_of(37):
        result["cut"] = driver.conversation(["a"])
    result["batch"] = driver.conversation(["a", "b", "c", "d", "e"])
    with driver.pages_left(FEW_PAGES):
        result["preempted"] = driver.conversation(["b", "c", "d", "e", "a"])
    result["preemptions"] = driver.scheduler.preemptions
    result["forks"] = forks(driver)
    result["prefixes"] = prefixes(driver)
    result["counters"] = driver.manager.counters
    driver.expect_queries()
    result["asked"], states = driver.conversation(["a"]), driver.states
    with driver.wide():
        for names in (["a"], ["b", "a", "c"]):
            run = f"asked_wide{len(names)}"
            result[run] = driver.conversation(names)
            apart[run] = float((driver.states - states).abs().max())
    driver.manager.check_integrity()
    driver.forget()
    result["lost"] = PAGES - 1 - driver.manager.block_pool.get_num_free_blocks()
    return result


def forks(driver: Driver) -> list[dict[str, Any]]:
    """Two continue one conversation at once, then each alone from nothing."""
    first = driver.ask({"root": (text("root", 0, 200), 20)})["root"]
    history = text("root", 0, 200) + first["answer"]
    both = {name: (history + text(name, 1, 25), 50) for name in ("left", "right")}
    together = driver.ask(both, after=2)
    driver.forget()
    alone = {}
    for name, request in both.items():
        alone |= driver.ask({name: request})
        driver.forget()
    return [together, alone]


def prefixes(driver: Driver, prompt: str = "system") -> list[dict[str, Any]]:
    """Four conversations on one system prompt, one after the other, then each from nothing."""
    system = text(prompt, 0, 180)
    requests = {f"user{i}": (system + text(f"user{i}", 0, 80), 40) for i in range(4)}
    shared, alone = {}, {}
    for name, request in requests.items():
        shared |= driver.ask({name: request})
    driver.forget()
    for name, request in requests.items():
        alone |= driver.ask({name: request})
        driver.forget()
    return [shared, alone]


if __name__ == "__main__":
    finished = main(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(finished))
