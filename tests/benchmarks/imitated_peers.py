"""FlashAttention 3 and FlashInfer as the benchmarks call them, in plain torch: what a block table means."""

from __future__ import annotations

from typing import Any

import torch


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    scale: float,
) -> torch.Tensor:
    """One sequence: query ``[heads, D]``, cache ``[blocks, B, kv_heads, D]``; ``[heads, D]`` in float32."""
    key, value = (cache[blocks.long()].flatten(0, 1)[:length].float() for cache in (keys, values))
    group = query.shape[0] // key.shape[1]
    key, value = (cache.repeat_interleave(group, dim=1) for cache in (key, value))
    weights = torch.einsum("hd,thd->ht", query.float() * scale, key).softmax(dim=1)
    return torch.einsum("ht,thd->hd", weights, value)


class FlashAttentionModule:
    """``vllm.vllm_flash_attn``."""

    def __init__(self) -> None:
        self.schedules: list[dict[str, Any]] = []

    def get_scheduler_metadata(self, **given: Any) -> torch.Tensor:
        """A schedule that its use can be told by."""
        self.schedules.append(given)
        return torch.tensor([len(self.schedules) - 1], dtype=torch.int32)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        seqused_k: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: list[int],
        block_table: torch.Tensor,
        softcap: float,
        scheduler_metadata: torch.Tensor | None,
        num_splits: int,
        fa_version: int,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Sequences of one query each."""
        assert (max_seqlen_q, fa_version, causal, softcap, window_size) == (1, 3, True, 0.0, [-1, -1])
        assert cu_seqlens_q.tolist() == list(range(q.shape[0] + 1))
        assert max_seqlen_k == int(seqused_k.max())
        if scheduler_metadata is not None:
            schedule = self.schedules[int(scheduler_metadata)]
            assert schedule["cache_seqlens"].tolist() == seqused_k.tolist()
            assert schedule["num_splits"] == num_splits
            assert (schedule["num_heads_q"], schedule["num_heads_kv"]) == (q.shape[1], k.shape[2])
        for sequence, length in enumerate(seqused_k.tolist()):
            used = block_table[sequence, : -(-length // k.shape[1])]
            out[sequence] = attend(q[sequence], k, v, used, length, softmax_scale).to(out.dtype)
        return out


class Wrapper:
    """``BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        self.fixed = use_cuda_graph
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((buffer is not None) == use_cuda_graph for buffer in self.buffers)
        self.planned = ""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        seq_lens: torch.Tensor,
    ) -> None:
        """The ordinary plan."""
        blocks = indptr[1:] - indptr[:-1]
        assert ((blocks - 1) * page_size + last_page_len).tolist() == seq_lens.tolist()
        if self.fixed:
            for buffer, given in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                assert buffer is not None
                buffer.copy_(given)
        else:
            self.buffers = (indptr, indices, last_page_len)
        self.scale, self.page, self.planned = sm_scale, page_size, "ordinary"

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """What the buffers describe."""
        bounds, indices, last = self.buffers
        assert bounds is not None
        assert indices is not None
        assert last is not None
        for sequence, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            length = (stop - start - 1) * self.page + int(last[sequence])
            attended = attend(query[sequence], *cache, indices[start:stop], length, self.scale)
            out[sequence] = attended.to(out.dtype)


class FlashInferModule:
    """``flashinfer``, and its ``decode`` module."""

    BatchDecodeWithPagedKVCacheWrapper = Wrapper

    def __init__(self) -> None:
        self.decode = self
        self.fast_plans = 0

    def fast_decode_plan(self, wrapper: Wrapper, indptr: torch.Tensor, *sizes: Any, **types: Any) -> None:
        """The plan that leaves the buffers to its caller."""
        assert wrapper.fixed
        assert wrapper.planned
        self.fast_plans += 1
