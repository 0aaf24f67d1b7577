"""Speculation on the cache manager: drafts are written, and some of them taken back, at any moment.

The simulated worker of the manager's tests checks every page that attention and sealing would read.
"""

from __future__ import annotations

import random
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.tangram.test_manager import FakeRequest, G, Worker, conversation, manager


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 70))
def test_rejected_drafts_leave_nothing_behind(seed: int, drafts: int, start: int) -> None:
    """However many are accepted, every later step, seal and resumption reads the true tokens only."""
    rng, m = random.Random(seed), manager(400)
    worker, truth, resumed = Worker(m), conversation("truth", start + 150), 0
    for turn in range(3):
        request = FakeRequest(f"r{turn}", truth[: start + 50 * turn])
        while request.num_computed_tokens < request.num_tokens:
            assert worker.schedule(request, 9)
        while (computed := request.num_computed_tokens) < start + 50 * turn + 30:
            right = rng.randint(0, drafts)
            guesses = [("guess", seed, i) for i in range(drafts - right)]
            # What the last step sampled, then the drafts, of which the first few will turn out right.
            request.tokens = truth[: computed + 1 + right] + guesses
            assert worker.schedule(request, 1 + drafts)
            accepted = min(right, request.num_computed_tokens - computed - 1)
            request.num_computed_tokens = computed + 1 + accepted
            request.tokens = truth[: request.num_computed_tokens]
            m.check_integrity()
        longest = request.num_computed_tokens
        worker.finish(request)
        m.check_integrity()
        resumed += len(m.resident)
    assert resumed > 0 or start + 130 < G.page_tokens
    assert G.sealed(longest) <= m.counters["seals"]
    m.evict()
    assert m.block_pool.get_num_free_blocks() == 400
