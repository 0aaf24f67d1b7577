"""``tangram plan``: how many conversations of which length fit a card."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from tangram import shipped
from tangram.config import HELP, TangramConfig
from tangram.errors import ConfigError
from tangram.plan.cards import CARDS, GIB, Card, card, several
from tangram.plan.facts import ITEMSIZES, ModelFacts, read_facts
from tangram.plan.sizing import UTILISATION, Budget, Plan, budget, make_plan

SETTINGS = ("retention", "group_size", "page_tokens", "chunk", "window", "scope", "profile")
"""Fields of the configuration that are options here; the others come from the environment."""


def add_to(commands: Any) -> None:
    """Add the command to ``tangram``."""
    parser = commands.add_parser(
        "plan",
        help="say how many conversations of which length fit a GPU, from the formula",
        description="Say how many conversations of which length fit a GPU, from the formula and the model's "
        "configuration: no GPU is needed, and nothing is loaded.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu", metavar="CARD", help=f"{', '.join(CARDS)}, or its GiB of memory (default a100-80)"
    )
    parser.add_argument(
        "--model", required=True, help="a directory, a config.json, or a hub id (common ones need no network)"
    )
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=HELP[name])
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that share the model, as of vLLM",
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="as of vLLM; default: the model's")
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help="lengths of conversations, tokens"
    )
    parser.add_argument(
        "--dtype", default="auto", help=f"auto (bfloat16) or one of {', '.join(ITEMSIZES)}, as of vLLM"
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=UTILISATION, metavar="SHARE", help="as of vLLM"
    )
    for name, text in (
        ("weights", "what the weights take in all, instead of the files' size or a count"),
        ("working", "what vLLM works in on each GPU, instead of the estimate"),
        ("kv-cache", "the KV cache's size on each GPU, as vLLM's log shows it, instead of all of the above"),
    ):
        parser.add_argument(f"--{name}-gib", type=float, metavar="GIB", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Returns 0 where one conversation of the greatest length fits, 1 otherwise."""
    given = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    config = TangramConfig.from_sources(given, os.environ)
    for option in ("max_model_len", "lengths"):
        values = getattr(arguments, option)
        if any(n < 1 for n in (values if isinstance(values, list) else [values]) if n is not None):
            raise ConfigError(f"--{option.replace('_', '-')}", "must be at least 1")
    facts = read_facts(arguments.model, arguments.dtype, arguments.tensor_parallel_size)
    config = shipped.settled(config, arguments.model)
    chosen = card(arguments.gpu or "a100-80")
    spent: Budget | None = None
    if arguments.kv_cache_gib is None:
        sizes = [
            None if value is None else int(value * GIB)
            for value in (arguments.weights_gib, arguments.working_gib)
        ]
        spent = budget(chosen, facts, arguments.gpu_memory_utilization, *sizes)
        pool = spent.pool
    else:
        pool = facts.shape.ranks * int(arguments.kv_cache_gib * GIB)
    plan = make_plan(facts, config, pool, arguments.max_model_len, arguments.lengths)
    if arguments.json:
        print(json.dumps(as_json(facts, config, chosen, spent, plan)))
    else:
        print("\n".join(lines(facts, config, chosen, spent, plan)))
    return 0 if plan.fits else 1


def as_json(
    facts: ModelFacts, config: TangramConfig, chosen: Card, spent: Budget | None, plan: Plan
) -> dict[str, Any]:
    """The plan for programs: bytes and tokens, and the prediction as ``POST /tangram/preview`` gives it."""
    return {
        "model": facts.shape.name,
        "config": config.to_dict(),
        "gpu": {"title": chosen.title, "memory_bytes": chosen.memory_bytes} if spent else None,
        "gpus": facts.shape.ranks,
        "weight_bytes": spent.weights if spent else None,
        "working_bytes": spent.working if spent else None,
        "pool_bytes": max(0, plan.pool),
        "max_model_len": plan.max_model_len,
        "longest": plan.longest,
        "fits": plan.fits,
        "full_conversations_at": {str(n): count for n, count in plan.full.items()},
        "prediction": plan.prediction.to_dict(),
    }


def lines(
    facts: ModelFacts, config: TangramConfig, chosen: Card, spent: Budget | None, plan: Plan
) -> list[str]:
    """The plan for people."""
    found = [f"{facts.shape.name}, retention {config.retention:g}"]
    if spent:
        how = "their files" if facts.measured else "counted from the configuration"
        found += [
            f"{several(facts.shape.ranks, chosen.title)}: {spent.usable / GIB:.1f} GiB usable",
            f"  weights         {spent.weights / GIB:6.1f} GiB  ({how})",
            f"  working memory  {spent.working / GIB:6.1f} GiB  (estimate)",
        ]
    found.append(f"  KV cache        {plan.pool / GIB:6.1f} GiB")
    if spent and spent.pool <= 0:
        where = "this card" if facts.shape.ranks == 1 else "these cards"
        return [*found, f"The model does not fit {where}."]
    found += ["", "    tokens   one, answered   one, idle   conversations   with a full cache"]
    for at in plan.prediction.at:
        found.append(
            f"{at.tokens:10,} {mib(at.bytes):>15} {mib(at.idle_bytes):>11} {at.conversations:15,}"
            f" {plan.full[at.tokens]:19,}"
        )
    found.append("")
    if plan.fits:
        found.append(f"A conversation of the greatest length, {plan.max_model_len:,} tokens, fits.")
    else:
        found.append(
            f"A conversation of the greatest length, {plan.max_model_len:,} tokens, does not fit, so the "
            f"engine would not start. The longest that fits has {plan.longest:,}: --max-model-len "
            f"{plan.longest // 1024 * 1024 or plan.longest}, or a lower retention."
        )
    found += [f"Note: {warning}." for warning in plan.prediction.warnings]
    return found


def mib(size: int) -> str:
    """Bytes for a table."""
    return f"{size / (1 << 20):,.1f} MiB" if size else "-"
