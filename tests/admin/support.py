"""Stand-ins for the engine and its process, with the shapes of the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.errors import EngineNotReady, EngineStartFailed
from app.settings import Settings
from app.supervisor import EngineState, EngineSupervisor, Overrides
from tangram.errors import EngineRejected, EngineUnavailable


def report(
    layers: int = 30,
    kv_heads: int = 3,
    sequences: int = 4,
    *,
    scale: int = 1,
    time: float = 1_700_000_000.0,
    tiers: int = 6,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A memory report; ``scale`` multiplies what the heads hold, as after more turns."""
    budget = [
        [0.1 + 0.8 * ((3 * layer + 5 * head) % 11) / 10 for head in range(kv_heads)]
        for layer in range(layers)
    ]
    places = [(layer, head) for layer in range(layers) for head in range(kv_heads)]

    def tier_of(layer: int, head: int) -> int:
        return (3 * layer + 5 * head) % tiers

    tokens = [[int(100 * scale * sequences * value) for value in row] for row in budget]
    rows = [
        {
            "id": f"cmpl-{index * 2654435761 % 2**32:08x}{index:024x}-0",
            "state": "running" if index % 4 == 0 else "resident",
            "tokens": 700 + 13 * (index % 50),
            "sealed_chunks": 1,
            "pages": 20 * scale + index % 7,
            "idle_seconds": None if index % 4 == 0 else 3.0 * index,
        }
        for index in range(sequences)
    ]
    running = sum(row["pages"] for row in rows if row["state"] == "running")
    resident = sum(row["pages"] for row in rows if row["state"] == "resident")
    total = max(1000, 2 * (running + resident))
    page_bytes = 131_072
    return {
        "time": time,
        "model": {
            "name": "SmolLM2-135M-Instruct",
            "layers": layers,
            "kv_heads": kv_heads,
            "head_size": 64,
            "dtype": "bfloat16",
            "max_model_len": 8192,
        },
        "config": {
            "retention": 0.5,
            "chunk": 512,
            "window": 128,
            "sink": 4,
            "page_tokens": 16,
            "group_size": 16,
            "scope": "model",
            "scorer": "keydiff",
            "alpha": 1.0,
            "rewind": 64,
            "profile": None,
            **(config or {}),
        },
        "geometry": {
            "group_size": 16,
            "page_tokens": 16,
            "chunk": 512,
            "tiers": [
                {"keep": 64 + 64 * tier, "heads": [where for where in places if tier_of(*where) == tier]}
                for tier in range(tiers)
            ],
        },
        "pool": {
            "total_pages": total,
            "free_pages": total - running - resident,
            "running_pages": running,
            "resident_pages": resident,
            "page_bytes": page_bytes,
            "pages": {
                "ring": running // 2,
                "sealed": running - running // 2,
                "resident": resident,
                "prefix": 0,
                "free": total - running - resident,
            },
        },
        "heads": {
            "budget": budget,
            "tokens_kept": tokens,
            "pages": [[-(-value // 16) for value in row] for row in tokens],
            "tier": [[tier_of(layer, head) for head in range(kv_heads)] for layer in range(layers)],
            "waste": [[value / 10 for value in row] for row in budget],
        },
        "sequences": rows,
        "full_cache_bytes": 3 * (running + resident) * page_bytes,
        "used_bytes": (running + resident) * page_bytes,
        "counters": {"takeovers": 5 * scale, "evictions": 1, "seals": 12 * scale, "preemptions": 0},
    }


def prometheus(ttft: Mapping[str, int]) -> str:
    """A page with vLLM's two histograms; ``ttft`` maps upper bounds to cumulative counts."""
    lines = [
        "# HELP vllm:num_requests_running Running.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0"} 1.0',
    ]
    for name in ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"):
        lines += [f"# HELP {name} Seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{engine="0",le="{bound}"}} {count}.0' for bound, count in ttft.items()]
        lines += [f'{name}_count{{engine="0"}} {max(ttft.values())}.0', f'{name}_sum{{engine="0"}} 1.0']
    return "\n".join(lines) + "\n"


class Engine:
    """An engine that can be taken away and that answers previews by simple arithmetic."""

    def __init__(self) -> None:
        self.up = True
        self.memory_calls = 0
        self.data = report()
        self.metrics = prometheus({"0.1": 2, "0.5": 8, "+Inf": 8})

    async def memory(self, sequence: str | None = None) -> dict[str, Any]:
        self.memory_calls += 1
        self._check()
        self.data = {**self.data, "time": self.data["time"] + 2}
        return self.data

    async def metrics_text(self) -> str:
        self._check()
        return self.metrics

    async def preview(self, **changes: float | int) -> dict[str, Any]:
        self._check()
        values = {**self.data["config"], **changes}
        if values["group_size"] > 90:
            raise EngineRejected(400, "group_size: must be at most 90, the number of heads")
        lengths = (4096, 16384, 65536)
        full = {str(length): length * 23_040 for length in lengths}
        held = {key: int(value * values["retention"]) for key, value in full.items()}
        return {
            "bytes_at": held,
            "idle_bytes_at": {key: value * 7 // 8 for key, value in held.items()},
            "full_bytes_at": full,
            "conversations_at": {key: 10**9 // value for key, value in held.items()},
            "ring_bytes": 16_384 * values["group_size"],
            "row_width": 4096,
            "fragmentation": 0.031,
            "padding_share": 0.07,
            "warnings": ["One group holds every head: all get the same budget."]
            if values["group_size"] > 45
            else [],
            "geometry": {},
            "heads": {},
        }

    def _check(self) -> None:
        if not self.up:
            raise EngineUnavailable("The engine does not answer (ConnectError).")


class Supervisor(EngineSupervisor):
    """Restarts the stand-in engine; ``refuse`` makes the next start fail, ``gate`` holds it back."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings)
        self.engine = engine
        self.refuse = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self.applied: list[Overrides] = []
        self.models: list[str] = []
        self._status = replace(self._status, state=EngineState.READY, model="SmolLM2-135M-Instruct")

    def reader(self) -> Engine:
        if not self.status.ready:
            raise EngineNotReady("The engine is starting. Try again in a moment.")
        return self.engine

    @property
    def client(self) -> Any:
        return self.reader()

    @property
    def watching(self) -> Any:
        return self.reader()

    def log_tail(self, lines: int = 100) -> list[str]:
        return ["INFO engine <b>started</b>", "INFO ready"][-lines:]

    async def start(self, overrides: Overrides | None = None) -> None:
        self._set(EngineState.READY)

    async def stop(self) -> None:
        self._set(EngineState.STOPPED)

    async def restart(self, overrides: Overrides, model: str | None = None) -> None:
        self._set(EngineState.STARTING, phase="loading the model")
        await self.gate.wait()
        try:
            if self.refuse:
                raise EngineStartFailed(self.refuse, rolled_back=True)
            self.applied.append(overrides)
            if model is not None:
                self.models.append(model)
            self.engine.data = {**self.engine.data, "config": {**self.engine.data["config"], **overrides}}
        finally:
            self._set(EngineState.READY, phase="")


@dataclass(frozen=True)
class Person:
    """Whoever is signed in."""

    id: str
    is_admin: bool


class Keeper:
    """Settings and audit trail in memory; ``full`` makes writes fail as on a full disk."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.audit: list[tuple[str | None, str, Any, Any]] = []
        self.full = False

    async def get_setting(self, key: str) -> Any:
        return self.settings.get(key)

    async def set_setting(self, key: str, value: Any) -> None:
        if self.full:
            raise OSError("disk full")
        self.settings[key] = value

    async def add_audit(self, user_id: str | None, action: str, before: Any, after: Any) -> None:
        self.audit.append((user_id, action, before, after))
