"""The overhead ladder for decoding at a fixed memory: what each part of the method brings.

Conversations of the Qwen3-4B shape (36 layers, 32 query heads, 8 KV heads of 128, bfloat16) decode together,
as many as the memory holds. The rungs, each on top of the one before:

    dynamic reclaim         budgets are found on the GPU while a chunk is compressed and read back by the
                            host, which writes the page table anew; a whole chunk is over-allocated until
                            then; all heads share one page table, as long as the longest head's
    + budget reservation    budgets are known before: nothing is over-allocated or read back
    + ragged paging         heads of similar budget share tables, not all as long as the longest
    + ahead-of-time split   our decode kernel; before, one block for each (request, KV head)

**Measured** here: one decode step's attention of all 36 layers in one graph at the rung's batch; sealing one
chunk of one conversation; for dynamic reclaim also the choice of budgets on the GPU, the copy to the host,
the new table and its copy back, by the host's clock from an idle GPU until it is idle again. Each
conversation seals one chunk in 512 steps, and that share of its cost is added to a step.
**Simulated**: dynamic reclaim is no engine. Its budgets come from random scores, its page table is one row,
and its effect on the steps that wait for it (an emptied pipeline) is not counted. Its attention and that of
the next two rungs is FlashAttention 3 with one sequence for each (request, KV head) and num_splits=1, which
reads what the heads kept and no more, also where the table is longer.
**Computed**: conversations, by `benchmarks/ladder.py`. **Given**: the rest of a step (--rest-ms), measured
elsewhere and the same on all rungs.

    python benchmarks/cuda_ladder.py --rest-ms 4.2 --json ladder.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.budgets import (
    CHUNK,
    SPREAD,
    geometry_layout,
    longest_keep,
    model_geometry,
    spread_geometry,
)
from benchmarks.cases import Case, by_head, whole_model
from benchmarks.checks import Disagreement, check, our_kernels
from benchmarks.ladder import RUNGS, Cost, Rung, conversation_bytes, fitting
from benchmarks.peers import UNSPLIT, FlashAttention3, PeerMissing, load_flash_attention
from benchmarks.timing import Sampler, alternate, capture, device_sampler, host_sampler
from kernels import ragged_seal
from tangram.geometry import Geometry

SINK = 4


class Reclaim:
    """Compression of one chunk whose budgets are found at run time, simulated.

    Args:
        case: its first request's last sealed chunk is sealed again and again.
        geometry: of the model.
        retention: mean share of a chunk that is kept.
    """

    def __init__(self, case: Case, geometry: Geometry, retention: float) -> None:
        self.case, self.geometry = case, geometry
        device, heads = case.pool.device, geometry.layers * geometry.kv_heads
        last = geometry.sealed(case.lengths[0]) - 1
        if last < 0:
            raise SystemExit(f"{case.lengths[0]} tokens: too short to seal a chunk")
        self.due = torch.tensor([[0, last]], dtype=torch.int32, device=device)
        self.tier_heads = torch.tensor(
            [len(tier.heads) for tier in geometry.tiers], dtype=torch.int32, device=device
        )
        self.scores = torch.rand(heads, CHUNK, device=device)
        self.kept = max(1, round(heads * CHUNK * retention))
        chunk_pages = CHUNK // geometry.page_tokens
        self.table = list(range(last * chunk_pages))
        self.fresh = list(range(last * chunk_pages, (last + 1) * chunk_pages))  # over-allocated for the chunk
        self.free = list(range((last + 1) * chunk_pages, (last + 2) * chunk_pages))
        self.device_row = torch.zeros((last + 1) * chunk_pages, dtype=torch.int32, device=device)
        self.host_row = torch.zeros_like(self.device_row, device="cpu")
        if device.type == "cuda":
            self.host_row = self.host_row.pin_memory()

    def seal(self) -> None:
        """Score, choose and write one chunk of one conversation, all heads of all layers: one launch."""
        case = self.case
        ragged_seal(case.pool, case.rows, self.due, self.tier_heads, case.layout, SINK)

    def reclaim(self) -> None:
        """Seal, and do what must be done where budgets are not known before."""
        flat = self.scores.flatten()
        least = flat.kthvalue(flat.numel() - self.kept + 1).values
        counts = (self.scores >= least).sum(dim=1)
        self.seal()
        longest = int(counts.cpu().max())  # waits for the GPU
        kept = -(-longest // self.geometry.page_tokens)
        table = self.table + self.fresh[:kept]
        self.host_row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        self.device_row.copy_(self.host_row, non_blocking=True)
        # What is too much goes back, and the next chunk gets a whole one again.
        self.free.extend(self.fresh[kept:])
        self.fresh = self.fresh[:kept] + [self.free.pop() for _ in self.fresh[kept:]]


def lengths(context: int, most: int) -> list[int]:
    """Unequal lengths below the context, as in serving."""
    return [context - (index * 97) % max(1, context // 8) for index in range(most)]


def batch_of(rung: Rung, geometry: Geometry, longest: int, arguments: argparse.Namespace) -> list[int]:
    """Tokens of the conversations that fit the memory.

    Raises:
        SystemExit: not even one does.
    """
    everyone = lengths(arguments.context, arguments.most)
    memory = int(arguments.gib * 2**30)
    fit = fitting(
        memory, everyone, lambda tokens: conversation_bytes(rung, geometry, longest, tokens), arguments.most
    )
    if not fit:
        raise SystemExit(f"{rung.name}: not even one conversation fits {arguments.gib:g} GiB")
    return fit


def attention(rung: Rung, case: Case, module: Any) -> Sampler:
    """One step's attention of all layers.

    Raises:
        Disagreement: FlashAttention 3 does other work than ours.
    """
    if rung.split_ahead:
        return device_sampler(capture(case.step))
    out = torch.empty_like(case.out)
    sequences = case.sequences()
    peer = FlashAttention3(module, sequences, case.cache(), by_head(case.query), by_head(out), UNSPLIT)
    check("fa3", case, peer.attend, out)
    return device_sampler(capture(peer.step))


def sealing(rung: Rung, reclaim: Reclaim) -> Sampler:
    """One chunk of one conversation."""
    if rung.reads_back:
        reclaim.reclaim()
        return host_sampler(reclaim.reclaim)
    return device_sampler(capture(reclaim.seal))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rungs.

    Raises:
        PeerMissing, Disagreement: as they say.
    """
    module = load_flash_attention()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.budgets == "spread":
        geometry = spread_geometry(arguments.retention)
    else:
        geometry = model_geometry(arguments.retention)
    longest = longest_keep(arguments.budgets, arguments.retention)
    batches = [batch_of(rung, geometry, longest, arguments) for rung in RUNGS]
    # Rows of all requests are as wide as the longest one's: somewhat more than what they hold.
    layout, page = geometry_layout(geometry), geometry.page_tokens * 2 * geometry.head_size
    elements = max(len(batch) * layout.width(max(batch)) for batch in batches) * geometry.group_size * page
    memory = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU: the times mean nothing"
    print(f"{name}; our kernels: {our_kernels(memory)}")
    print(
        f"{arguments.gib:g} GiB, {arguments.context} tokens, retention {arguments.retention} "
        f"({arguments.budgets} budgets; the longest head keeps {longest} of {CHUNK}), "
        f"the rest of a step taken as {arguments.rest_ms:g} ms"
    )
    samplers: dict[str, Sampler] = {}
    for rung, batch in zip(RUNGS, batches, strict=True):
        case = whole_model(geometry, batch, memory)
        samplers[f"attention {rung.name}"] = attention(rung, case, module)
        samplers[f"seal {rung.name}"] = sealing(rung, Reclaim(case, geometry, arguments.retention))
    times = alternate(samplers, arguments.rounds)
    print(f"{'rung':28}  conv.  MiB each  attention ms  seal us  sealing ms  step ms  tokens/s")
    rows: list[dict[str, Any]] = []
    for rung, batch in zip(RUNGS, batches, strict=True):
        seal, rest = times[f"seal {rung.name}"], arguments.rest_ms * 1000
        cost = Cost(len(batch), times[f"attention {rung.name}"], seal, rest, CHUNK)
        each = sum(conversation_bytes(rung, geometry, longest, one) for one in batch) / len(batch)
        rows.append(
            {"rung": rung.name, "conversations": cost.batch, "bytes_each": each}
            | {"attention_us": cost.attention, "seal_us": cost.seal, "sealing_us_a_step": cost.sealing}
            | {"step_us": cost.step, "tokens_a_second": cost.tokens_a_second}
        )
        print(
            f"{rung.name:28} {cost.batch:6d} {each / 2**20:9.0f} {cost.attention / 1000:13.2f}"
            f" {cost.seal:8.0f} {cost.sealing / 1000:11.3f} {cost.step / 1000:8.2f}"
            f" {cost.tokens_a_second:9.0f}"
        )
    print(
        "Simulated: dynamic reclaim (no engine; its waiting steps are not counted). FlashAttention 3 with "
        "num_splits=1 on the first three rungs."
    )
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    return {"device": name, "longest": longest, "settings": settings, "rungs": rows}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=64.0, help="memory of the KV cache")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a conversation, at most")
    parser.add_argument("--retention", type=float, default=0.25, choices=list(SPREAD))
    parser.add_argument("--budgets", default="spread", choices=["spread", "model"])
    parser.add_argument("--rest-ms", type=float, default=0.0, help="a step without attention and sealing")
    parser.add_argument("--most", type=int, default=1024, help="conversations, at most")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        result = run(arguments)
    except (PeerMissing, Disagreement) as error:
        sys.exit(str(error))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
