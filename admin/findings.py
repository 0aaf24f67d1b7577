"""What of this installation limits it, and what to do: as the engine and the host say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from admin.text import bytes_text
from app.preflight import checks
from app.preflight.probes import Host

FEW_LONGEST = 4
"""Conversations of the model's greatest length that a pool should have room for."""


@dataclass(frozen=True)
class Finding:
    """tone: "warn" for what should be changed, "info" for what to know."""

    tone: str
    text: str
    advice: str


def findings(status: Mapping[str, Any]) -> list[Finding]:
    """By a report of ``GET /tangram/status``; empty while there is none."""
    return [*_kernels(status), *_room(status), *_profile(status)] if status else []


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
        found.append(Finding("info", text, "VLLM_CPU_KVCACHE_SPACE says how much."))
    return found


def _kernels(status: Mapping[str, Any]) -> Iterator[Finding]:
    if status.get("kernels") == "reference":
        yield Finding(
            "warn",
            "Attention runs on plain torch, which is slow.",
            "Install a compiler (on a GPU nvcc) or the prebuilt kernels, then restart the engine. Its log "
            "says why the compiled ones are not used.",
        )


def _room(status: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        pages = int(status["pool"]["total_pages"])
        longest = int(status["geometry"]["row_width"])
        length = int(status["model"]["max_model_len"])
    except (KeyError, TypeError, ValueError):
        return
    fit = pages // max(1, longest)
    text = f"The pool has room for {fit} conversations of the greatest length, {length:,} tokens."
    if fit < FEW_LONGEST:
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
