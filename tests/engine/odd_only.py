"""A logits processor of a user's own, as vLLM loads one by name: those who ask for it get odd tokens only."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


def _odd(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """logits: [vocabulary]."""
    logits[::2] = -torch.inf
    return logits


class OddOnly(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        return _odd if (params.extra_args or {}).get("odd") else None
