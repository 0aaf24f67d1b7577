"""What can be refused from the command line alone, before vLLM builds a configuration from it.

vLLM objects to some of it in words of its own, and on some machines only (two ranks on one device, sleep mode
on a CPU): who asks for what the ragged cache cannot give reads our sentence, wherever. What is not decidable
from the options is left to :mod:`tangram.support`, which has the sentences and looks at everything.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from tangram.errors import UnsupportedError
from tangram.support import REFUSALS, SPREADING

NGRAM = ("ngram", "[ngram]")
PLAIN_CACHE_TYPES = ("auto", "half", "float", "float16", "bfloat16", "float32")
"""Those that may be the model's own."""


def _drafts(asked: Namespace) -> bool:
    """Drafts by anything but n-grams. vLLM takes a method's name in the model's place too."""
    config = asked.speculative_config
    if isinstance(config, Mapping):
        return (config.get("method") or config.get("model")) not in NGRAM
    return (asked.spec_method or asked.spec_model) not in (None, *NGRAM)


def _many_hosts(asked: Namespace) -> bool:
    return asked.data_parallel_size > 1 and (
        asked.data_parallel_size_local not in (None, asked.data_parallel_size)
        or asked.data_parallel_backend != "mp"
        or asked.headless
    )


def _events(asked: Namespace) -> bool:
    config = asked.kv_events_config
    if isinstance(config, Mapping):
        return bool(config.get("enable_kv_cache_events"))
    return bool(getattr(config, "enable_kv_cache_events", False))


ASKED_BY: Mapping[str, Callable[[Namespace], Any]] = {
    "a pooling model (embeddings, rewards, classification)": lambda asked: asked.runner == "pooling",
    "KV sharing between layers": lambda asked: asked.kv_sharing_fast_prefill,
    "an engine that is spread over several hosts": lambda asked: (
        asked.nnodes > 1 or asked.distributed_executor_backend in SPREADING
    ),
    "pipeline parallelism": lambda asked: asked.pipeline_parallel_size > 1,
    "data parallelism with a balancer outside the engine": lambda asked: (
        asked.data_parallel_rank is not None
        or asked.data_parallel_start_rank is not None
        or asked.data_parallel_external_lb
        or asked.data_parallel_hybrid_lb
        or asked.data_parallel_multi_port_external_lb
    ),
    "data parallelism over several hosts": _many_hosts,
    "context parallelism": lambda asked: (
        asked.prefill_context_parallel_size > 1 or asked.decode_context_parallel_size > 1
    ),
    "dual-batch overlap": lambda asked: asked.enable_dbo or asked.ubatch_size > 1,
    "a KV cache of another type than the model": lambda asked: asked.kv_cache_dtype not in PLAIN_CACHE_TYPES,
    "prefix hashes finer than a page": lambda asked: (
        None not in (asked.prefix_match_unit, asked.block_size)
        and asked.prefix_match_unit != asked.block_size
    ),
    "a KV connector or KV offloading": lambda asked: (
        asked.kv_transfer_config is not None or asked.kv_offloading_size is not None
    ),
    "an encoder cache connector": lambda asked: asked.ec_transfer_config is not None,
    "KV cache events": _events,
    "returning routed experts": lambda asked: asked.enable_return_routed_experts,
    "sleep mode": lambda asked: asked.enable_sleep_mode,
    "this kind of speculative decoding": _drafts,
}
"""By the feature's name in :data:`tangram.support.REFUSALS`: whether vLLM's parsed options ask for it."""


def check_arguments(asked: Namespace) -> None:
    """Raise UnsupportedError with the sentence of the first feature that the options ask for.

    Args:
        asked: what vLLM's parser of its API server's options made of them.
    """
    for refusal in REFUSALS:
        by = ASKED_BY.get(refusal.feature)
        if by is not None and by(asked):
            raise UnsupportedError(refusal.sentence())
