"""What of this installation limits it, and what to do: as the engine and the host say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from admin.text import bytes_text, percent_text
from app.preflight import checks
from app.preflight.probes import Host
from tangram.config import TangramConfig
from tangram.errors import TangramError
from tangram.geometry import Geometry, that_fit

FEW_LONGEST = 4
"""Conversations of the model's greatest length that a pool should have room for."""


@dataclass(frozen=True)
class Finding:
    """tone: "warn" for what should be changed, "info" for what to know."""

    tone: str
    text: str
    advice: str


def findings(status: Mapping[str, Any], geometry: Geometry | None) -> list[Finding]:
    """By a report of ``GET /tangram/status`` and the cache's geometry; empty while there is no report."""
    return [*_kernels(status), *_room(status, geometry), *_profile(status)] if status else []


def host_findings(host: Host, wants_gpu: bool) -> list[Finding]:
    """GPUs and memory, as before the start. Asks the driver, which takes a moment.

    Args:
        wants_gpu: whether the engine is to run on a GPU of this host.
    """
    gpus = host.gpus()
    found = []
    for gpu in gpus:
        capability = ".".join(map(str, gpu.capability))
        memory = f"{bytes_text(gpu.free)} of {bytes_text(gpu.total)} free, " if gpu.total else ""
        text = f"{gpu.name}: {memory}driver {gpu.driver}, compute capability {capability}."
        found.append(Finding("info", text, "The engine takes its share when it starts."))
        problems = (checks.driver_recent(gpu), checks.gpu_recent(gpu))
        found += [Finding("warn", problem.text, "") for problem in problems if problem is not None]
    if wants_gpu and (problem := checks.gpu_visible(gpus)) is not None:
        found.append(Finding("warn", problem.text, ""))
    if not gpus:
        free, cache = host.memory()
        text = f"{bytes_text(free)} of memory are free; an engine on the CPU that starts now takes "
        text += f"{bytes_text(cache)} of it for its cache."
        found.append(Finding("info", text, "VLLM_CPU_KVCACHE_SPACE sets how much."))
    return found


def _kernels(status: Mapping[str, Any]) -> Iterator[Finding]:
    if "reference" in (status.get("kernels") or ""):  # of one of the engines and ranks at least
        yield Finding(
            "warn",
            "Attention runs on plain torch, which is slow.",
            "Install a compiler (on a GPU nvcc) or the prebuilt kernels, then restart the engine. Its log "
            "says why the compiled ones are not used.",
        )


def _room(status: Mapping[str, Any], geometry: Geometry | None) -> Iterator[Finding]:
    if geometry is None:
        return
    try:
        pools = [one["pool"] for one in status.get("engines") or [status]]
        pages = [int(pool["total_pages"]) for pool in pools]
        length = int(status["model"]["max_model_len"])
        config = TangramConfig.from_mapping({**status["config"], "profile": None})
    except (KeyError, TypeError, ValueError, TangramError):
        return
    running, idle = geometry.bytes(length), geometry.idle_bytes(length, config.observed)
    # A conversation lies in one engine: what is left over in several makes no room for another one.
    fits = [that_fit(count * geometry.page_bytes, running, idle) for count in pages]
    several = len(fits) > 1
    text = (
        f"{f'The pools of {len(fits)} engines have' if several else 'The pool has'} room for {sum(fits)} "
        f"conversations of the greatest length, {length:,} tokens, at retention "
        f"{percent_text(config.retention)}, if one {'in each' if several else 'of them'} is being answered."
    )
    if min(fits) < FEW_LONGEST:
        advice = (
            "Lower the retention in the tab Tune, lower --max-model-len, or give the cache more memory "
            "(--gpu-memory-utilization on a GPU, VLLM_CPU_KVCACHE_SPACE on a CPU)."
        )
        yield Finding("warn", text, advice)
    else:
        yield Finding("info", text, "Shorter ones take less: the tab Tune says how many fit.")


def _profile(status: Mapping[str, Any]) -> Iterator[Finding]:
    if status.get("profile") == "uniform":
        text = "No profile: all heads keep the same, which loses details."
        yield Finding("warn", text, "Calibrate this model in the tab Profiles, or choose one made for it.")


def findings_panel(found: list[Finding]) -> str:
    """As notices, what should be changed first."""
    if not found:
        return '<p class="empty">Not looked at yet.</p>'
    ordered = sorted(found, key=lambda one: one.tone != "warn")
    return "".join(
        f'<div class="notice {escape(one.tone)}"><b>{escape(one.text)}</b> {escape(one.advice)}</div>'
        for one in ordered
    )
