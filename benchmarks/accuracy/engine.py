"""One condition on the real engine: all samples of a cell at once, turn after turn, so that rows are
resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import engines
from benchmarks.accuracy.answers import Answered, Read
from benchmarks.accuracy.chat import Conversation, Template
from benchmarks.accuracy.loss import LossSample
from tangram.config import PROFILE_SCORERS, TangramConfig
from tangram.errors import ProfileError
from tangram.profile import Profile, load_profile_file
from tangram.profile_file import Matrix

SHUFFLE_SEED = 2606
STEP_TOKENS = 4096
"""Of a step at most: a prompt's log probabilities take as many rows of the vocabulary."""


def shuffled(profile: Profile, seed: int = SHUFFLE_SEED) -> Profile:
    """The same budgets for other heads: the control that shows whether it matters which head gets which."""
    layers, heads = len(profile.mean), len(profile.mean[0])
    order = list(range(layers * heads))
    Random(seed).shuffle(order)

    def permuted(table: Any) -> tuple[tuple[float, ...], ...]:
        flat = [value for row in table for value in row]
        flat = [flat[place] for place in order]
        return tuple(tuple(flat[row * heads : (row + 1) * heads]) for row in range(layers))

    return with_needs(profile, permuted(profile.mean), permuted(profile.std))


def level(profile: Profile) -> Profile:
    """Equal budgets for all heads, by a profile that still knows what they are asked."""
    layers, heads = len(profile.mean), len(profile.mean[0])
    return with_needs(profile, ((0.5,) * heads,) * layers, ((0.0,) * heads,) * layers)


def with_needs(profile: Profile, mean: Matrix, std: Matrix) -> Profile:
    """The same profile with other needs, at all retentions."""
    known = profile.calibration
    if known is not None:
        known = replace(known, least=mean, most=mean, needs=(mean,), samples=1, others=(), key_needs=None)
    return replace(profile, mean=mean, std=std, calibration=known)


def settings(condition: dict[str, Any], profiles: dict[str, str], folder: Path) -> TangramConfig:
    """The engine's configuration of a condition.

    Args:
        profiles: files: "kvzip", and by the names of scorers those calibrated with themselves.
        folder: where a changed profile is written.

    Raises:
        ProfileError: the condition needs a profile that is not given.
    """
    budgets, scorer = condition["budgets"], condition["scorer"]
    values = {"retention": condition["retention"], "scorer": scorer}
    if budgets in ("full", "dynamic") or (budgets == "uniform" and scorer not in PROFILE_SCORERS):
        return TangramConfig(**values)
    wanted = scorer if budgets == "own" else "kvzip"
    if wanted not in profiles:
        raise ProfileError(f"the condition needs a profile of the oracle {wanted}, which was not given")
    path = profiles[wanted]
    if budgets in ("shuffled", "uniform"):
        path = str(folder / f"{budgets}.json")
        found = load_profile_file(profiles[wanted]).at(condition["retention"])
        (shuffled if budgets == "shuffled" else level)(found).save(path)
    return TangramConfig(**values, profile=path)


class Engine:
    """A vLLM engine with the plugin in this process, which must not have loaded vLLM before."""

    def __init__(self, job: dict[str, Any], template: Template, decode: Callable[[list[int]], str]) -> None:
        self.template, self.decode = template, decode
        config = settings(job["condition"], job["profiles"], Path(job["folder"]))
        options = engines.engine_options(config.retention, config.profile)
        options["additional_config"] = json.loads(config.to_json())
        import vllm

        self._params = vllm.SamplingParams
        self.llm = vllm.LLM(
            job["model"],
            skip_tokenizer_init=True,
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            max_num_seqs=64,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=int(job["kv_gib"] * 2**30),
            gpu_memory_utilization=0.1,  # of others on this GPU vLLM knows nothing; the line above decides
            enforce_eager=True,
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler

    def converse(self, conversations: Sequence[Conversation]) -> list[list[Answered]]:
        """Answers to the questions of each conversation. All of a turn are in flight together."""
        found: list[list[Answered]] = [[] for _ in conversations]
        for turn in range(len(conversations[0].turns)):
            prompts = [
                {"prompt_token_ids": one.prompt(self.template, turn), "cache_salt": str(number)}
                for number, one in enumerate(conversations)
            ]
            asked = [one.turns[turn].question for one in conversations]
            params = [
                self._params(
                    temperature=0.0,
                    max_tokens=1 if question is None else question.max_tokens,
                    stop_token_ids=list(self.template.stops),
                    detokenize=False,
                )
                for question in asked
            ]
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            for answers, question, output in zip(found, asked, outputs, strict=True):
                if question is not None:
                    ids = [t for t in output.outputs[0].token_ids if t not in self.template.stops]
                    cached = output.num_cached_tokens or 0
                    answers.append(Answered(turn + 1, self.decode(ids), len(output.prompt_token_ids), cached))
        self.forget()
        return found

    def losses(self, samples: Sequence[LossSample]) -> list[Read]:
        """Mean loss of each text, in nats a token. vLLM computes a prompt anew to tell its probabilities."""
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(one.tokens)} for one in samples]
        found = []
        for one, output in zip(samples, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            steps = list(zip(one.tokens, output.prompt_logprobs, strict=True))[one.first :]
            found.append(Read(-sum(step[token].logprob for token, step in steps) / len(steps)))
        self.forget()
        return found

    def forget(self) -> None:
        """Drop all conversations, so that the next cell finds the whole cache."""
        self.scheduler.manager.evict()

    def kept(self, tokens: int) -> float:
        """The share of a history's tokens that is kept, mean over heads."""
        geometry = self.scheduler.manager.geometry
        return float(geometry.kept_fraction(tokens))
