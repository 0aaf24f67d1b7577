"""What of this installation limits it, and what to do: from what the engine says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

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
        return '<p class="empty">The engine does not say anything of itself now.</p>'
    ordered = sorted(found, key=lambda one: one.tone != "warn")
    return "".join(
        f'<div class="notice {escape(one.tone)}"><b>{escape(one.text)}</b> {escape(one.advice)}</div>'
        for one in ordered
    )
