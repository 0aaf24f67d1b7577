"""What each scorer costs: the time to seal one chunk, and the memory of the queries that it looks at.

    python -m benchmarks.scorers [--layers 24 --kv-heads 2 --group 7 --head-size 64] [--threads 1]

Sizes default to those of Qwen2.5-0.5B, chunk and windows to the engine's. States are random; a seal's time
does not depend on them. The best of the rounds is shown: whatever else runs only adds. A conversation is
sealed once every `chunk` tokens: divide by it for the cost a token.
"""

from __future__ import annotations

import argparse
import time

import torch

from tangram.config import QUERY_SCORERS, SCORERS, TangramConfig
from tangram.mean_queries import MeanQueries
from tangram.profile import ModelShape, build_geometry
from tangram.rotary import Rotary
from tangram.scorers import get_scorer
from tangram.sealing import Observed, seal_chunk


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("layers", 24), ("kv-heads", 2), ("group", 7), ("head-size", 64), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=15)
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)

    config = TangramConfig(retention=0.25)
    shape = ModelShape("measured", sizes.layers, sizes.kv_heads, sizes.head_size, 2, "bfloat16", 32768)
    geometry = build_geometry(config, shape)
    pages = geometry.pages(geometry.boundary(0))
    pool = torch.randn(pages, geometry.group_size, geometry.page_tokens, 2 * geometry.head_size).bfloat16()
    row = torch.arange(pages, dtype=torch.int32)
    queries = torch.randn(
        sizes.layers, config.query_window, sizes.kv_heads * sizes.group, sizes.head_size
    ).bfloat16()
    rotary = Rotary(torch.rand(sizes.layers, sizes.head_size // 2))
    observed = Observed(queries, torch.full((sizes.layers,), sizes.head_size**-0.5), rotary)

    means = MeanQueries(torch.randn(sizes.layers, sizes.kv_heads, sizes.head_size), rotary)

    print(f"{'scorer':<20}{'ms a seal':>12}{'queries, MiB a request':>26}")
    for name in SCORERS:
        scorer, times = get_scorer(name), []
        for _ in range(sizes.rounds):
            start = time.perf_counter()
            seal_chunk(pool, row, geometry, 0, config.sink, scorer, observed, mean_queries=means)
            times.append(time.perf_counter() - start)
        held = queries.nbytes / 2**20 if name in QUERY_SCORERS else 0.0
        print(f"{name:<20}{min(times) * 1e3:>12.1f}{held:>26.1f}")


if __name__ == "__main__":
    main()
