"""What vLLM can be asked for and the ragged cache cannot give, each with the sentence that the user sees.

One table, read off vLLM's configuration before a model is loaded; :mod:`tangram.layer_support` has what only
a model's own code knows. A sentence says what is refused, why, and what to do instead. docs/compatibility.md
lists it all, and what works; a test keeps page and tables together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tangram.errors import UnsupportedError
from tangram.own_classes import other_scheduler, warn_of_other_worker
from tangram.plugin import SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOCK = "serve this model with stock vLLM"
ONE_ENGINE = "start one engine a device, each with its own share of the users"
SPREADING = ("ray", "external_launcher")
"""vLLM's ways to run workers on any host."""


@dataclass(frozen=True)
class Refusal:
    """One row of the table.

    Attributes:
        feature: its name, as it stands in docs/compatibility.md.
        asked: whether a configuration asks for it.
        why: the reason, to follow a colon.
        instead: what to do.
    """

    feature: str
    asked: Callable[[VllmConfig], Any]
    why: str
    instead: str

    def sentence(self) -> str:
        """What the user reads."""
        return f"{self.feature} cannot be used with the ragged cache: {self.why}. Instead: {self.instead}."


def _text_value(name: str) -> Callable[[VllmConfig], Any]:
    """Whether the model's own configuration has something under that name."""
    return lambda vllm: getattr(vllm.model_config.hf_text_config, name, None)


def _cache_type(vllm: VllmConfig) -> bool:
    own = str(vllm.model_config.dtype).removeprefix("torch.")
    return vllm.cache_config.cache_dtype not in ("auto", own)


def _drafts(vllm: VllmConfig) -> bool:
    """Drafts other than those that were proven: n-grams, planned after the last step's outcome is known."""
    spec = vllm.speculative_config
    return spec is not None and (
        spec.method != "ngram"
        or bool(vllm.scheduler_config.async_scheduling)
        or vllm.device_config.device_type != "cpu"
    )


def _many_hosts(vllm: VllmConfig) -> bool:
    """Engines that are, or with Ray may be, on another host than the API server."""
    parallel = vllm.parallel_config
    return parallel.data_parallel_size > 1 and (
        parallel.data_parallel_size_local != parallel.data_parallel_size
        or parallel.data_parallel_backend != "mp"
    )


def _images(vllm: VllmConfig) -> bool:
    media = vllm.model_config.multimodal_config
    return media is not None and not media.language_model_only


def _several_hosts(vllm: VllmConfig) -> bool:
    parallel = vllm.parallel_config
    return parallel.nnodes > 1 or parallel.distributed_executor_backend in SPREADING


def _finer_hashes(vllm: VllmConfig) -> bool:
    cache = vllm.cache_config
    return cache.prefix_match_unit is not None and cache.prefix_match_unit != cache.block_size


REFUSALS: tuple[Refusal, ...] = (
    # ---- the model ------------------------------------------------------------------------------------
    Refusal(
        "an encoder-decoder model",
        lambda vllm: vllm.model_config.is_encoder_decoder,
        "its cross-attention reads keys of another sequence, which never grow and are never sealed",
        STOCK,
    ),
    Refusal(
        "a pooling model (embeddings, rewards, classification)",
        lambda vllm: vllm.model_config.runner_type == "pooling",
        "it reads a prompt once and keeps no conversation, so there is nothing to compress",
        STOCK,
    ),
    Refusal(
        "a model without attention layers",
        lambda vllm: vllm.model_config.is_attention_free,
        "it has no keys and values",
        STOCK,
    ),
    Refusal(
        "a model with Mamba or linear-attention layers",
        lambda vllm: vllm.model_config.is_hybrid or vllm.model_config.has_inner_state,
        "the state of such a layer cannot be resumed from a page's edge",
        STOCK,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda vllm: vllm.model_config.use_mla,
        "all heads share one latent vector, so there is no budget a head",
        STOCK,
    ),
    Refusal(
        "a diffusion language model",
        lambda vllm: vllm.model_config.is_diffusion,
        "it rewrites tokens that are in the cache already",
        STOCK,
    ),
    Refusal(
        "ALiBi",
        lambda vllm: vllm.model_config.uses_alibi,
        "the kernels add no bias by distance",
        STOCK,
    ),
    Refusal(
        "KV sharing between layers",
        lambda vllm: _text_value("num_kv_shared_layers")(vllm) or vllm.cache_config.kv_sharing_fast_prefill,
        "a layer that reads another one's keys would be counted and sealed twice",
        STOCK,
    ),
    Refusal(
        "attention in local chunks",
        _text_value("attention_chunk_size"),
        "its layers forget at fixed positions, which the ragged rows do not follow",
        STOCK,
    ),
    Refusal(
        "images, video and sound in a prompt",
        _images,
        "no model that reads them was tested",
        "add --language-model-only to serve the model for text",
    ),
    # ---- several devices ------------------------------------------------------------------------------
    Refusal(
        "tensor parallelism that does not divide the KV heads",
        lambda vllm: vllm.model_config.get_total_num_kv_heads() % vllm.parallel_config.tensor_parallel_size,
        "every rank must hold equally many heads of each tier, and none of them twice",
        f"choose a --tensor-parallel-size that divides the KV heads of the model's layers; {ONE_ENGINE}",
    ),
    Refusal(
        "an engine that is spread over several hosts",
        _several_hosts,
        "its workers are asked about the cache on sockets of one host, and no other way was tested",
        "start it on one host, without --nnodes and with --distributed-executor-backend mp",
    ),
    Refusal(
        "pipeline parallelism",
        lambda vllm: vllm.parallel_config.pipeline_parallel_size > 1,
        "a page holds heads of all layers, and each rank would have only some of them",
        f"leave --pipeline-parallel-size at 1; {ONE_ENGINE}",
    ),
    Refusal(
        "data parallelism with a balancer outside the engine",
        lambda vllm: (
            vllm.parallel_config.data_parallel_external_lb or vllm.parallel_config.data_parallel_hybrid_lb
        ),
        "a conversation stays in the engine that has its pages, so one server must know all of them",
        "give --data-parallel-size only",
    ),
    Refusal(
        "data parallelism over several hosts",
        _many_hosts,
        "the API server asks each engine for its memory over a socket of the host",
        "start one engine a host, each with its own share of the users",
    ),
    Refusal(
        "data parallelism of a mixture-of-experts model",
        lambda vllm: (
            vllm.parallel_config.data_parallel_size > 1
            and (vllm.model_config.is_moe or vllm.parallel_config.enable_elastic_ep)
        ),
        "its engines share the experts and take every step together, empty ones too, which was not tested",
        f"leave --data-parallel-size at 1; {ONE_ENGINE}",
    ),
    Refusal(
        "context parallelism",
        lambda vllm: (
            vllm.parallel_config.prefill_context_parallel_size > 1
            or vllm.parallel_config.decode_context_parallel_size > 1
        ),
        "a row of pages cannot be split over devices by position",
        "leave --prefill-context-parallel-size and --decode-context-parallel-size at 1",
    ),
    Refusal(
        "dual-batch overlap",
        lambda vllm: vllm.parallel_config.enable_dbo or vllm.parallel_config.ubatch_size > 1,
        "a step's sealing would run between two halves of one batch",
        "leave --enable-dbo and --ubatch-size out",
    ),
    # ---- the cache ------------------------------------------------------------------------------------
    Refusal(
        "a KV cache of another type than the model",
        _cache_type,
        "the kernels and the scores read keys in the model's own precision; lower retention saves more",
        "leave --kv-cache-dtype at auto",
    ),
    Refusal(
        "prefix hashes finer than a page",
        _finer_hashes,
        "a conversation resumes at a page's edge",
        "leave --prefix-match-unit out, or choose smaller pages with --tangram-page-tokens",
    ),
    Refusal(
        "a KV connector or KV offloading",
        lambda vllm: vllm.kv_transfer_config is not None,
        "it moves whole blocks of tokens, and a page of the ragged cache means nothing without its row",
        "leave --kv-transfer-config and --kv-offloading-size out",
    ),
    Refusal(
        "an encoder cache connector",
        lambda vllm: vllm.ec_transfer_config is not None,
        "only models that read images need one",
        "leave --ec-transfer-config out",
    ),
    Refusal(
        "KV cache events",
        lambda vllm: vllm.kv_events_config is not None and vllm.kv_events_config.enable_kv_cache_events,
        "they announce blocks of tokens, of which there are none: a router would learn nothing",
        "leave --kv-events-config out; GET /tangram/memory says what is resident",
    ),
    Refusal(
        "returning routed experts",
        lambda vllm: vllm.aux_output_config.enabled,
        "vLLM files them by cache slot, and slots of the ragged cache are used again",
        "leave --enable-return-routed-experts out",
    ),
    Refusal(
        "sleep mode",
        lambda vllm: vllm.model_config.enable_sleep_mode,
        "it was not tested",
        "leave --enable-sleep-mode out; stop the engine to free its memory",
    ),
    # ---- scheduling -----------------------------------------------------------------------------------
    Refusal(
        "another scheduler than Tangram's",
        other_scheduler,
        "its steps would cross the boundaries at which old tokens are compressed",
        f"start the engine with tangram serve, or add --scheduler-cls {SCHEDULER}",
    ),
    Refusal(
        "this kind of speculative decoding",
        _drafts,
        "a draft model keeps keys of its own, and a step planned before the last one's drafts are judged "
        "could cross a seal boundary",
        'use {"method": "ngram"} on a CPU, or leave --speculative-config out',
    ),
)


def check_supported(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError with the sentence of the first feature that is asked for and refused."""
    for refusal in REFUSALS:
        if refusal.asked(vllm_config):
            raise UnsupportedError(refusal.sentence())
    warn_of_other_worker(vllm_config)
