"""A logits processor with which a request lasts: whoever asks for it waits for every token.

A tiny model would be done with its longest answer before a test on a busy machine has looked at the request.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

SECONDS = 0.05
"""For a token."""


def _waits(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """logits: [vocabulary]."""
    time.sleep(SECONDS)
    return logits


class Slowly(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False  # or it would be left out where nothing is sampled

    def new_req_logits_processor(self, params: Any) -> Any:
        return _waits if (params.extra_args or {}).get("slowly") else None
