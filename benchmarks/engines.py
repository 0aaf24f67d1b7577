"""The engines that the serving benchmarks compare, and what a process does that runs one of them."""

from __future__ import annotations

import json
import os
from typing import Any, TextIO

ENGINES = {"stock": None, "tangram 1.0": 1.0, "tangram 0.5": 0.5, "tangram 0.25": 0.25}
"""Name to retention; None for vLLM without the plugin."""


def answers_channel() -> TextIO:
    """Where a child writes its answers. vLLM prints, so standard output becomes standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def plugin_options(retention: float | None) -> dict[str, Any]:
    """vLLM's options of an engine in this process, whose environment is set for it: before vLLM is loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = "tangram" if retention else ""
    if not retention:
        return {}
    os.environ["TANGRAM"] = "1"
    from tangram.config import TangramConfig

    config = TangramConfig(retention=retention)
    return {
        "scheduler_cls": "tangram.scheduler.TangramScheduler",
        "block_size": config.page_tokens,
        "additional_config": json.loads(config.to_json()),
    }
