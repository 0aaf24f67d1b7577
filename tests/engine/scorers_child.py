"""Runs one tiny engine of random weights through every scorer, and writes what was said and what was kept.

    python scorers_child.py MODEL_FOLDER RESULT.json

For each scorer: the same conversations with a large and with a small budget of tokens a step, and once more
with what had been generated given as a prompt. One engine serves all, so that only one has to start: between
runs the scorer and the budget are exchanged and idle conversations are dropped.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "retention": 0.25,
    "chunk": 64,
    "window": 32,
    "rewind": 32,
    "query_window": 32,
    "group_size": 3,
    "scorer": "expected_attention",
}
BUDGETS = (2048, 150)
BOUNDARY = 96  # where the first chunk is sealed
# Conversation to the tokens of its turns: new ones, then generated ones. Two first turns end in the midst of
# the last queries before a boundary (of 213 tokens 208 can be resumed, the boundary is at 224) and at one (of
# 425 tokens 416): the second turns compute these queries again, and may seal a chunk again.
TURNS = {"a": [(400, 26), (150, 80)], "b": [(39, 90), (60, 14)], "c": [(160, 54), (20, 61)]}


def save_model(folder: Path) -> None:
    """A model whose heads attend to something: weights far larger than a trained model starts from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def reference_queries(folder: Path, ids: list[int]) -> Any:
    """[layers, query_window, query heads, head_size]: a text's last queries, computed by transformers."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        cos, sin = model.model.rotary_emb(states[0], torch.arange(len(ids))[None])
        found = []
        for layer, state in zip(model.model.layers, states, strict=False):
            query = (
                layer.self_attn.q_proj(layer.input_layernorm(state)).view(1, len(ids), 4, 16).transpose(1, 2)
            )
            found.append(apply_rotary_pos_emb(query, query, cos, sin)[0][0].transpose(0, 1))
    return torch.stack(found)[:, -SETTINGS["query_window"] :]


def different(kept: list[Any]) -> list[Any]:
    """In order; a chunk that was sealed again in the same way counts once."""
    return [json.loads(text) for text in sorted({json.dumps(seal) for seal in kept})]


def main(folder: Path) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_PLUGINS": "tangram", "TANGRAM": "1", "TANGRAM_CHECK_INTEGRITY": "1"}
    warnings.simplefilter("ignore")
    save_model(folder)

    import torch
    from vllm import LLM, SamplingParams

    from tangram import sealer, sealing
    from tangram.config import SCORERS, TangramConfig
    from tangram.mean_queries import MeanQueries
    from tangram.scorers import get_scorer

    config = TangramConfig.from_mapping(SETTINGS)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=max(BUDGETS),
        enforce_eager=True,
        block_size=config.page_tokens,
        scheduler_cls="tangram.scheduler.TangramScheduler",
        worker_cls="tangram.cpu_worker.TangramCPUWorker",
        additional_config=json.loads(config.to_json()),
    )
    core: Any = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    runner = core.model_executor.driver_worker.worker.model_runner
    own = runner.attn_groups[0][0].get_metadata_builder().sealer

    kept: list[Any] = []
    seen: list[Any] = []
    select, seal_chunk = sealing.select, sealer.seal_chunk

    def recording_select(*args: Any) -> Any:
        chosen = select(*args)
        kept[-1][2].append(chosen.tolist())
        return chosen

    def recording_seal(pool: Any, row: Any, geometry: Any, chunk: int, *args: Any) -> None:
        rows = scheduler.manager.req_to_blocks.items()
        (request,) = (name for name, pages in rows if pages[0].block_id == int(row[0]))
        kept.append((scheduler.requests[request].cache_salt, chunk, []))
        seen.append(args[2].queries.clone())
        seal_chunk(pool, row, geometry, chunk, *args)

    sealing.select, sealer.seal_chunk = recording_select, recording_seal

    def generate(contexts: dict[str, list[int]], new: dict[str, int]) -> None:
        prompts = [{"prompt_token_ids": list(contexts[name]), "cache_salt": name} for name in new]
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in new.values()
        ]
        for name, output in zip(new, llm.generate(prompts, params, use_tqdm=False), strict=True):
            contexts[name] += output.outputs[0].token_ids

    def converse(budget: int) -> dict[str, Any]:
        scheduler.reset_prefix_cache()
        scheduler.max_num_scheduled_tokens = own.recorder._step_tokens = budget
        kept.clear()
        rng = random.Random(1)
        contexts: dict[str, list[int]] = {name: [] for name in TURNS}
        for turn in range(2):
            now = {name: turns[turn] for name, turns in TURNS.items() if turn < len(turns)}
            for name, (new, _) in now.items():
                contexts[name] += [rng.randrange(384) for _ in range(new)]
            generate(contexts, {name: answer for name, (_, answer) in now.items()})
        return {"contexts": contexts, "kept": different(kept)}

    first = [random.Random(2).randrange(384) for _ in range(BOUNDARY)]
    generate({"q": list(first)}, {"q": 2})
    expected = reference_queries(folder, first)
    result: dict[str, Any] = {
        "queries": {"shape": list(seen[0].shape), "error": float((seen[0] - expected).abs().max())},
        "largest query": float(expected.abs().max()),
    }
    means = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(3))
    own.mean_queries = MeanQueries(means, own.rotary)
    for name in SCORERS:
        own.scorer = get_scorer(name)
        result[name] = {str(budget): converse(budget) for budget in BUDGETS}
        # The same text once more, all but its last token as a prompt.
        scheduler.reset_prefix_cache()
        kept.clear()
        said = result[name][str(BUDGETS[0])]["contexts"]
        generate({conversation: list(ids[:-1]) for conversation, ids in said.items()}, dict.fromkeys(said, 1))
        result[name]["as a prompt"] = {"kept": different(kept)}
    result["takeovers"] = scheduler.manager.counters["takeovers"]
    result["slots"] = own.recorder.slots
    return result


if __name__ == "__main__":
    finished = main(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(finished))
