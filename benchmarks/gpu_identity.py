"""Whether the plugin at retention 1.0 answers as stock vLLM does, token by token, on a real model.

    python benchmarks/gpu_identity.py --model DIR [--dtypes float16 bfloat16] [--json FILE]

DIR is a prepared model (`python -m app.bundled_model MODELS_DIR` makes SmolLM2-135M-Instruct), or a GGUF
file of it, which is expanded first and needs the package gguf. To bring one to a machine that takes files
in parts:

    split -b 55M SmolLM2-135M-Instruct.Q4_1.gguf part.      cat part.* > model.gguf

With several GPUs, of which each engine then uses so many (SmolLM2 has three KV heads, which two cannot
share; a model of random weights, with eight, is made on the spot, and its prompts are random too):

    python benchmarks/gpu_identity.py --random --tensor-parallel-size 2 --json /dev/stdout

Conversations of four turns, with excerpts of a text of very different lengths, greedy, with torch.compile
and CUDA graphs. All histories hold stock vLLM's answers, so each answer can be compared by itself. Each
engine answers twice: all conversations at once, and one after another with an empty cache for each. In 16
bits a sum's order decides between two tokens that score nearly alike, so stock vLLM beside itself in other
company is the noise floor. Where two answers part, both engines' log probabilities of both tokens are
reported: the context is still the same there. A near tie shows a gap of one or two roundings of a logit
(1/64 in float16 and 1/8 in bfloat16, for logits from 16 to 32); a fault of the cache would show gaps of any
size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engines import MODEL, ROOT, answers_channel, child, device, engine_options, write_json

RETENTION = {"stock": None, "tangram": 1.0}
PAIRS = (
    ("stock, one at a time", "stock"),
    ("tangram", "stock"),
    ("tangram, one at a time", "stock, one at a time"),
    ("tangram, one at a time", "tangram"),
)
"""What is compared with what; the first is the noise floor."""
CANDIDATES = 20
"""The most likely tokens whose log probabilities are kept: vLLM's own limit."""
QUESTIONS = (
    "What is the text above about? Answer in two sentences.",
    "Who has to do something according to it, and what?",
    "Name three conditions that it sets.",
    "Write a short poem about this text.",
)
RANDOM = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
RANDOM |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": False}
"""What makes of Qwen3-4B's configuration one whose weights are quickly drawn."""
EXCERPTS = (0, 200, 500, 900, 1500, 2200, 3000, 4000, 5000, 6500, 8000, 10000)
"""Characters of a conversation's excerpt: from nothing to beyond several seal boundaries."""


# ---- the child --------------------------------------------------------------------------------------------


def worker(job: dict[str, Any]) -> None:
    """One engine: the answers of each turn, asked at once and one at a time."""
    answers = answers_channel()
    options = engine_options(RETENTION[job["engine"]])
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=64,
        kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
        enforce_eager=job["eager"],
        enable_prefix_caching=True,
        tensor_parallel_size=job["ranks"],
        **options,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=job["answer"], ignore_eos=True, detokenize=False, logprobs=CANDIDATES
    )

    def ask(prompts: list[list[int]]) -> list[dict[str, Any]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        found = []
        for output in outputs:
            said = output.outputs[0]
            likely = [{str(token): value.logprob for token, value in at.items()} for at in said.logprobs]
            found.append(
                {"tokens": list(said.token_ids), "likely": likely, "cached": output.num_cached_tokens}
            )
        return found

    # Histories hold the answers given, or, in the engine that gives them, its own.
    histories = list(job["openings"])
    together: list[list[dict[str, Any]]] = []
    asked: list[list[list[int]]] = []
    for turn, follow_up in enumerate(job["follow_ups"]):
        asked.append(histories)
        together.append(ask(histories))
        given = job["given"][turn] if job["given"] else [answer["tokens"] for answer in together[-1]]
        histories = [h + said + follow_up for h, said in zip(histories, given, strict=True)]
    alone: list[list[dict[str, Any]]] = [[] for _ in asked]
    for conversation in range(len(histories)):
        llm.reset_prefix_cache()
        for turn, prompts in enumerate(asked):
            alone[turn] += ask([prompts[conversation]])
    print(json.dumps({"together": together, "alone": alone, "device": device()}), file=answers, flush=True)


# ---- the parent -------------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse()
    if arguments.worker:
        worker(json.loads(arguments.worker.read_text()))
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            model = random_model(Path(folder) / "random")
            openings, follow_ups = drawn(arguments.conversations)
        else:
            model = prepared(arguments.model, Path(folder))
            openings, follow_ups = conversations(model, arguments.conversations)
        lengths = sorted(len(tokens) for tokens in openings)
        print(f"{len(openings)} conversations; first prompts of {lengths[0]} to {lengths[-1]} tokens")
        for dtype in arguments.dtypes:
            sides: dict[str, list[list[dict[str, Any]]]] = {}
            given = None
            for engine in RETENTION:
                job = {
                    "engine": engine,
                    "model": str(model),
                    "dtype": dtype,
                    "openings": openings,
                    "follow_ups": follow_ups,
                    "given": given,
                    "answer": arguments.answer,
                    "kv_gib": arguments.kv_gib,
                    "max_model_len": arguments.max_model_len,
                    "eager": arguments.eager,
                    "ranks": arguments.tensor_parallel_size,
                }
                (said,) = child(__file__, job, Path(folder))
                sides[engine], sides[f"{engine}, one at a time"] = said["together"], said["alone"]
                if given is None:
                    given = [[answer["tokens"] for answer in turn] for turn in said["together"]]
            figures[dtype] = [compare(dtype, one, other, sides) for one, other in PAIRS]
            write_json(arguments.json, "gpu_identity", vars(arguments), device=said["device"], dtypes=figures)


def prepared(model: Path, folder: Path) -> Path:
    """The model's directory; one made from a GGUF file."""
    if model.is_dir():
        return model
    sys.path.insert(0, str(ROOT))
    from app.gguf_llama import expand

    made = folder / "expanded"
    made.mkdir()
    # The package gguf imports this one where it is, and fails where it is incomplete; it is not needed here.
    sys.modules.setdefault("mistral_common", None)  # type: ignore[arg-type]
    expand(model, made)
    return made


def random_model(folder: Path) -> Path:
    """A Qwen3 of random weights, twelve layers of 16 query and 8 KV heads. They are large enough that each
    token depends on distant ones, and that the best next token stands out."""
    import torch
    from safetensors.torch import save_file

    config = MODEL | RANDOM
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    width, inner, size = (int(str(config[name])) for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, kv = (size * int(str(config[f"num_{kind}_heads"])) for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    words = (int(str(config["vocab_size"])), width)
    weights = {
        f"{name}.weight": torch.randn(*words, generator=draw) for name in ("model.embed_tokens", "lm_head")
    }
    weights["model.norm.weight"] = torch.ones(width)
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = torch.randn(*shape, generator=draw) * shape[1] ** -0.5
        weights |= {f"{prefix}{name}.weight": torch.ones(count) for name, count in norms.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def drawn(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """As :func:`conversations`, of token ids that mean nothing."""
    draw = random.Random(0)

    def ids(length: int) -> list[int]:
        return [draw.randrange(3, RANDOM["vocab_size"]) for _ in range(length)]

    openings = [ids(16 + EXCERPTS[index % len(EXCERPTS)] // 4) for index in range(count)]
    return openings, [ids(24) for _ in QUESTIONS]


def conversations(model: Path, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of first prompts, and what follows the answer of each turn (after the last: unused)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    def ids(words: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(words, add_special_tokens=False).ids
        return encoded

    openings = []
    for index in range(count):
        length = EXCERPTS[index % len(EXCERPTS)]
        begin = (index * 997) % max(1, len(text) - length)
        asked = f"{text[begin : begin + length]}\n\n{QUESTIONS[0]}"
        openings.append(ids(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"))
    later = [*QUESTIONS[1:], ""]
    follow_ups = [ids(f"<|im_end|>\n<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in later]
    return openings, follow_ups


def compare(dtype: str, one: str, other: str, sides: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """How many answers of two sides are identical, and where and how closely the others part."""
    partings, same, total = [], 0, 0
    for turn, (mine, theirs) in enumerate(zip(sides[one], sides[other], strict=True)):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            total += 1
            place = parting(a, b)
            if place is None:
                same += 1
            else:
                partings.append({"conversation": index, "turn": turn + 1, **place})
    gaps = sorted(place["gap"] for place in partings if place["gap"] is not None)
    words = ""
    if gaps:
        words = f"; gaps at their first difference: median {statistics.median(gaps):.3f}, most {gaps[-1]:.3f}"
    if unknown := len(partings) - len(gaps):
        words += f"; {unknown} with a token that the other did not have among its {CANDIDATES} best"
    print(f"{dtype:<9} {one} and {other}: {same} of {total} answers identical{words}", flush=True)
    return {"one": one, "other": other, "identical": same, "answers": total, "partings": partings}


def parting(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any] | None:
    """Where two answers to one prompt part: the position, both tokens, and by how much each side preferred
    its own, in nats; ``gap`` is the larger of the two. None where they are identical."""
    for position, (mine, theirs) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
        if mine == theirs:
            continue
        preferences = []
        for side, own, rival in ((a, mine, theirs), (b, theirs, mine)):
            likely = side["likely"][position]
            known = likely.get(str(rival))
            preferences.append(None if known is None else likely[str(own)] - known)
        known_ones = [value for value in preferences if value is not None]
        gap = max(known_ones) if len(known_ones) == 2 else None
        return {"position": position, "tokens": [mine, theirs], "preferences": preferences, "gap": gap}
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model's directory, or a GGUF file")
    parser.add_argument("--random", action="store_true", help="instead: random weights, and random prompts")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of an engine")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float16", "bfloat16"], choices=["float16", "bfloat16", "float32"]
    )
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GiB of KV cache")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (arguments.model is None) != arguments.random and not arguments.worker:
        parser.error("either --model or --random is needed")
    return arguments


if __name__ == "__main__":
    main()
