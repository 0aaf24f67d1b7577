"""A step that mixes the base model's tokens with two adapters' gives each its own, against a plain sum."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from tangram.cpu_lora import BaseKeepingPunica

WHO = [-1, 0, 1, -1, 1]
RANK, IN, OUT = 2, 6, 4


@pytest.fixture
def parts() -> tuple[torch.Tensor, ...]:
    """x [5, IN], y [5, OUT], stacked A [2, 1, RANK, IN] and B [2, 1, OUT, RANK]."""
    torch.manual_seed(0)
    shapes = ((5, IN), (5, OUT), (2, 1, RANK, IN), (2, 1, OUT, RANK))
    return tuple(torch.randn(shape) for shape in shapes)


def wrapper(kind: type[PunicaWrapperCPU]) -> PunicaWrapperCPU:
    made = kind(max_num_batched_tokens=8, max_batches=8, device="cpu")
    made.is_prefill = False
    made._token_lora_indices[: len(WHO)] = torch.tensor(WHO)
    made._sampler_indices[: len(WHO)] = torch.tensor(WHO)
    made.indices_len[:2] = [len(WHO), len(WHO)]
    return made


def expected(parts: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    x, y, a, b = parts
    rows = [y[i] if who < 0 else y[i] + scale * b[who, 0] @ (a[who, 0] @ x[i]) for i, who in enumerate(WHO)]
    return torch.stack(rows)


def linear(made: PunicaWrapperCPU, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, y, a, b = parts
    out = y.clone()
    made.add_lora_linear(out, x, (a,), (b,), 0.5, (OUT,))
    return out


def test_linear_layers(parts: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(linear(wrapper(BaseKeepingPunica), parts), expected(parts, 0.5))


def test_vllm_s_own_still_needs_the_repair(parts: tuple[torch.Tensor, ...]) -> None:
    """When this fails, vLLM has mended it: drop tangram/cpu_lora.py."""
    found, right = linear(wrapper(PunicaWrapperCPU), parts), expected(parts, 0.5)
    assert not torch.allclose(found[0], right[0])
    torch.testing.assert_close(found[1], right[1])


def test_the_output_layer(parts: tuple[torch.Tensor, ...]) -> None:
    x, y, a, b = parts
    out = y.clone()
    wrapper(BaseKeepingPunica).add_lora_logits(out, x, a, b, 0.5)
    torch.testing.assert_close(out, expected(parts, 0.5))


def test_embeddings(parts: tuple[torch.Tensor, ...]) -> None:
    x, y, a, b = parts
    out = y.clone()
    inner = torch.stack([a[max(who, 0), 0] @ x[i] for i, who in enumerate(WHO)])
    wrapper(BaseKeepingPunica).add_lora_embedding(out, inner, b)
    torch.testing.assert_close(out, expected(parts, 1.0))
