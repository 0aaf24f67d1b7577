"""What vLLM users switch on, on real engines of a tiny model of random weights (see docs/compatibility.md).

At retention 1.0 every output must be stock vLLM's. At a quarter it must not depend on the company, on how
prompts are cut, on whether a conversation was resumed, or on speculation. Chunks of 32 tokens let every
request cross several seal boundaries. The children verify the cache's whole bookkeeping at every step.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.children import ROOT, run_child
from tests.tiny_models import LLAMA, random_adapter, random_llama, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Result = dict[str, Any]

CACHE: dict[str, Any] = {"chunk": 32, "window": 16, "rewind": 16}
FULL, QUARTER = CACHE | {"retention": 1.0}, CACHE | {"retention": 0.25}
SAME = ("conversation", "batch", "cuts", "structured", "stops", "repetitive")
MORE = ("one_at_a_time", "samples", "bias", "processor", "beam", "priorities", "embeddings")
NUMBERS = ("logprobs", "prompt_logprobs")


def drafting(tokens: int) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": tokens, **lookup}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Result]:
    """Run a child on a job in a process of its own; returns what it wrote."""
    folder = tmp_path_factory.mktemp("features")

    def child(script: str, job: dict[str, Any]) -> Result:
        given = folder / f"{script}.job"
        given.write_text(json.dumps(job))
        finished: Result = run_child(script, given, folder, threads=1, timeout=600)
        return finished

    return child


@pytest.fixture(scope="module")
def model(bundled_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = random_llama(tmp_path_factory.mktemp("tiny"), bundled_model_dir)
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 2048, "max_num_seqs": 16}
    forms = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    return {"model": str(folder), "dtype": "float32", **limits, **forms}


@pytest.fixture(scope="module")
def results(
    run: Callable[[str, dict[str, Any]], Result],
    model: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Result:
    """All engines, one after another. A second engine that speculates needs a process of its own: vLLM scans
    every module when a worker starts, and stumbles over those that the first one's n-grams loaded."""
    adapters = [str(random_adapter(tmp_path_factory.mktemp("adapter") / f"{i}", i + 1)) for i in range(2)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    options |= {"scheduling_policy": "priority", "enable_prompt_embeds": True}
    options |= {"logits_processors": ["tests.engine.odd_only:OddOnly"]}
    uncut = {"enable_chunked_prefill": False, "prefix_caching_hash_algo": "sha256_cbor", "watermark": 0.02}
    lonely = {"enable_prefix_caching": False, "max_num_seqs": 1, "max_num_batched_tokens": 1024}
    compare, at_a_quarter = [*SAME, *MORE, *NUMBERS, "adapters"], ["invariance", "repetitive", "batch"]
    watched = ["aborts", "resets", "pages"]

    def engine(tangram: dict[str, Any] | None, checks: list[str], **more: Any) -> dict[str, Any]:
        return {"engine": model | more, "tangram": tangram, "checks": checks, "adapters": adapters}

    first = {
        "stock": engine(None, compare, **options),
        "full": engine(FULL, [*compare, *watched], **options),
        "quarter": engine(QUARTER, [*at_a_quarter, *watched], **uncut),
        "forgetful": engine(QUARTER, [*at_a_quarter, "pages"], **lonely),
        "drafting": engine(FULL, [*SAME, "drafts", *watched], **drafting(4)),
    }
    second = {"drafting quarter": engine(QUARTER, [*at_a_quarter, "drafts", "pages"], **drafting(5))}
    return run("features_child.py", first) | run("features_child.py", second)


@pytest.mark.parametrize("check", [*SAME, *MORE])
def test_full_retention_gives_what_stock_vllm_gives(results: Result, check: str) -> None:
    assert results["full"][check] == results["stock"][check]


@pytest.mark.parametrize("check", SAME)
def test_speculation_changes_nothing(results: Result, check: str) -> None:
    """Drafts that are accepted and drafts that are not, across seal boundaries."""
    assert results["drafting"][check] == results["stock"][check]


def test_speculation_really_drafted(results: Result) -> None:
    for name in ("drafting", "drafting quarter"):
        drafts = results[name]["drafts"]
        assert 0 < drafts["accepted"] < drafts["draft"], name


def test_log_probabilities_are_stock_vllm_s(results: Result) -> None:
    for ours, theirs in zip(results["full"]["logprobs"], results["stock"]["logprobs"], strict=True):
        assert ours == [[token, pytest.approx(value, abs=1e-3)] for token, value in theirs]


def test_prompt_log_probabilities_bypass_what_is_resident(results: Result) -> None:
    ours, theirs = results["full"]["prompt_logprobs"], results["stock"]["prompt_logprobs"]
    assert ours["cached"] == theirs["cached"] == 0
    assert len(ours["steps"]) == 199
    for one, other in zip(ours["steps"], theirs["steps"], strict=True):
        assert one == [[token, pytest.approx(value, abs=1e-3)] for token, value in other]


def test_token_budgets_of_a_step_change_nothing(results: Result) -> None:
    first, *others = results["full"]["cuts"]
    assert others == [first] * len(others)


def test_seeds_do_not_depend_on_company_or_cuts(results: Result) -> None:
    samples = results["full"]["samples"]
    assert samples["alone"] == samples["company"]
    assert len({tuple(tokens) for tokens in samples["alone"]}) == 3


def test_the_urgent_request_runs_before_the_one_that_waited_longer(results: Result) -> None:
    assert results["full"]["priorities"]["order"] == ["first", "urgent", "late"]


def test_structured_outputs_have_their_form(results: Result) -> None:
    found = results["full"]["structured"]
    assert found["choice"] in ("yes", "no")
    assert [len(part) for part in found["regex"].split("-")] == [3, 4]
    assert set(json.loads(found["json"])) == {"colour", "sure"}


def test_stops_stop(results: Result) -> None:
    found = results["full"]["stops"]
    text, tokens, _ = found["plain"]
    word = found["string"][2]
    assert found["string"][0] == text[: text.index(word)]
    assert found["included"][0] == text[: text.index(word) + len(word)]
    assert found["token"][1] == tokens[:16]
    assert len(found["least"][1]) >= 10
    assert tokens[0] not in found["forbidden"][1]


def test_a_logits_processor_of_the_user_s_own_serves_those_who_asked(results: Result) -> None:
    odd, any_token = results["full"]["processor"]
    assert all(token % 2 for token in odd)
    assert not all(token % 2 for token in any_token)


def test_adapters_and_the_base_model_never_share_a_row(results: Result) -> None:
    ours, theirs = results["full"]["adapters"], results["stock"]["adapters"]
    assert ours["alone"] == theirs["alone"]
    assert ours["cached at first"] == [0, 0, 0], "one prompt, three models: nobody continues another's row"
    assert ours["cached at second"] == [144, 144, 144], "each continues its own"
    # Stock vLLM on a CPU gives the base model's tokens an adapter's weights when they share a step, so what
    # it computes one at a time is the truth here (tangram/cpu_lora.py).
    assert ours["second"] == ours["second alone"] == ours["second anew"] == theirs["second alone"]


@pytest.mark.parametrize("engine", ["quarter", "forgetful", "drafting quarter"])
def test_at_a_quarter_nothing_depends_on_how_it_was_computed(results: Result, engine: str) -> None:
    found, plain = results[engine]["invariance"], results["quarter"]["invariance"]
    for name in ("anew", "again", "cut", "company"):
        assert found[name] == found["resumed"], name
    assert found["resumed"] == plain["resumed"], "nor on speculation or prefix caching"
    assert results[engine]["repetitive"] == results["quarter"]["repetitive"]
    assert results[engine]["batch"] == results["quarter"]["batch"] != results["stock"]["batch"]


def test_later_turns_resume_unless_prefix_caching_is_off(results: Result) -> None:
    for engine in ("quarter", "drafting quarter"):
        first, *later = results[engine]["invariance"]["cached"]
        assert first == 0
        assert all(cached > 180 for cached in later)
    assert results["forgetful"]["invariance"]["cached"] == [0, 0, 0]
    assert results["forgetful"]["pages"]["kept"] == 0


@pytest.mark.parametrize("engine", ["full", "quarter", "drafting"])
def test_aborts_at_any_moment_lose_no_page_and_disturb_nobody(results: Result, engine: str) -> None:
    found = results[engine]["aborts"]
    assert found["wrong"] == []
    assert found["lost"] == []
    assert {"queued", "prefill", "decode"} <= set(found["states"])


@pytest.mark.parametrize("engine", ["full", "quarter", "drafting"])
def test_resets_of_the_cache_in_the_middle_change_no_answer(results: Result, engine: str) -> None:
    assert results[engine]["resets"]["same"]
    assert results[engine]["resets"]["steps"] > 9


@pytest.mark.parametrize("engine", ["full", "quarter", "forgetful", "drafting", "drafting quarter"])
def test_every_page_is_free_in_the_end(results: Result, engine: str) -> None:
    pages = results[engine]["pages"]
    assert pages["lost"] == 0
    assert pages["counters"]["seals"] > 100


def test_what_only_a_loaded_model_shows_is_the_last_line_too(tmp_path: Path) -> None:
    """vLLM's Llama attends in both directions when told so, which shows in its layers only. They are built in
    the engine's process; the sentence still ends what the API server's process prints."""
    folder = write_config(tmp_path, **LLAMA | {"is_causal": False})
    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "512"]
    served = subprocess.run(
        [sys.executable, "-m", "tangram", "serve", str(folder), *options],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert served.returncode == 2
    assert served.stderr.strip().splitlines()[-1] == (
        "tangram: error: encoder-only attention cannot be used with the ragged cache, and this model has it. "
        "Instead: serve this model with stock vLLM."
    )


def test_callers_of_the_asynchronous_engine_may_leave_and_pause(
    run: Callable[[str, dict[str, Any]], Result], model: dict[str, Any]
) -> None:
    more = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "stream_interval": 3}
    found = run("async_child.py", {"engine": model | more, "tangram": QUARTER})
    assert found["wrong"] == []
    assert found["lost"] == []
    assert found["keep"] == found["wait"] == found["long"]
    assert 0 < len(found["abort"]) < len(found["long"])
    assert found["abort"] == found["long"][: len(found["abort"])]
    assert found["last"], "and afterwards all is as before"
    told = list(itertools.accumulate(found["parts"]))
    assert told[-1] == 20
    assert len(told) > 1
    # The first one comes at once. Who is slow to read gets several parts as one.
    assert all((count - 1) % 3 == 0 for count in told[:-1]), "tokens come in threes"
