"""vLLM's LoRA on a CPU, with one repair: a request without an adapter stays without one.

A step may hold requests of the base model beside requests of adapters. vLLM marks the base model's tokens
with adapter -1, which its GPU kernels skip. Its CPU operators index with it, and -1 is the last adapter
loaded: the base model's tokens of such a step get that adapter's weights, and the keys that they leave in the
cache are wrong for as long as the conversation lives. So here those tokens' rows are put back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class BaseKeepingPunica(PunicaWrapperCPU):
    """Adds adapters' outputs to the rows of their own tokens only."""

    @contextmanager
    def _base_rows_kept(self, y: torch.Tensor, adapters: torch.Tensor) -> Iterator[None]:
        """Whatever happens inside, rows of ``y`` [..., tokens, width] of tokens without an adapter stay.

        Args:
            adapters: [tokens], -1 for none.
        """
        flat = y.view(-1, y.shape[-1])
        rows = (adapters[: flat.shape[0]] < 0).nonzero().squeeze(-1)
        before = flat[rows]
        yield
        flat[rows] = before

    def add_lora_linear(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with self._base_rows_kept(y, self.token_lora_indices):
            super().add_lora_linear(y, *args, **kwargs)

    def add_lora_embedding(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with self._base_rows_kept(y, self.token_lora_indices):
            super().add_lora_embedding(y, *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with self._base_rows_kept(y, self.sampler_indices):
            super().add_lora_logits(y, *args, **kwargs)


def repair(lora_manager: Any) -> None:
    """Give a worker's LoRA manager this wrapper, which only changes methods."""
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        if type(wrapper) is PunicaWrapperCPU:
            wrapper.__class__ = BaseKeepingPunica
