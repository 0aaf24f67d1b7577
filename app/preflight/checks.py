"""Judges what the probes found. Pure: no check asks anybody anything."""

from __future__ import annotations

import errno
from pathlib import Path

from app.preflight.probes import Gpu, HubAnswer
from app.preflight.problems import Code, Problem
from tangram.config import TangramConfig
from tangram.plan.cards import GIB, Card, several
from tangram.plan.facts import ModelFacts
from tangram.plan.sizing import UTILISATION, budget, length_that_fits, make_plan

LEAST_DRIVER = 580
"""The first driver for CUDA 13."""
LEAST_CAPABILITY = (8, 0)
MOST_SKEW_SECONDS = 300.0


def writable(folder: Path, user: int, error: tuple[int, str]) -> Problem | None:
    """A directory of a volume."""
    number, words = error
    if not number:
        return None
    if number in (errno.ENOSPC, errno.EDQUOT):
        advice = "make room on that disk"
    elif number == errno.EROFS:
        advice = "mount it so that it can be written, as the volumes of docker-compose.yml are"
    else:
        advice = f"give it to that user (chown -R {user} on the host)"
    return Problem(
        Code.NOT_WRITABLE,
        f"{folder} cannot be written by user {user} ({words}): {advice}, or name another directory in "
        "TANGRAM_HOME or the variable that leads there",
    )


def port_free(port: int, error: str) -> Problem | None:
    """The port for Prometheus; the app's own is taken before all else."""
    if not error:
        return None
    return Problem(
        Code.SETTING,
        f"the metrics cannot be served on port {port}: {error}. Choose another one with "
        "TANGRAM_METRICS_PORT, or 0 for none",
    )


def library_there(name: str, package: str, found: bool) -> Problem | None:
    """A library that vLLM's build for the CPU loads, and without which it fails late and in odd words."""
    if found:
        return None
    return Problem(
        Code.MISSING_LIBRARY,
        f"{name} is not on this system, and the engine needs it: install it (Debian and Ubuntu: apt-get "
        f"install {package})",
    )


def database_usable(error: str) -> Problem | None:
    """The PostgreSQL database can be reached, is ours or empty, and nobody else writes to it."""
    return Problem(Code.DATABASE, error) if error else None


def gpu_visible(gpus: list[Gpu]) -> Problem | None:
    """There is a GPU at all."""
    if gpus:
        return None
    return Problem(
        Code.NO_GPU,
        "no GPU is visible here: on the host, see that nvidia-smi works and install the NVIDIA Container "
        "Toolkit; then reserve a GPU as docker-compose.yml does (TANGRAM_GPU names it). Without a GPU, use "
        "the CPU image: docker compose up cpu",
    )


def driver_recent(gpu: Gpu) -> Problem | None:
    """The driver can run CUDA 13."""
    major = gpu.driver.split(".")[0]
    if not major.isdigit() or int(major) >= LEAST_DRIVER:
        return None
    return Problem(
        Code.DRIVER_TOO_OLD,
        f"the host's NVIDIA driver is {gpu.driver}, and CUDA 13 needs {LEAST_DRIVER} or newer: update the "
        "driver on the host (the image brings all the rest)",
    )


def gpus_enough(gpus: list[Gpu], ranks: int, engines: int) -> Problem | None:
    """There are as many as share the model, for each engine."""
    if len(gpus) >= ranks * engines:
        return None
    asked = [f"TANGRAM_ENGINE_ARGS asks for {ranks} GPUs (--tensor-parallel-size)"] if ranks > 1 else []
    asked += [f"TANGRAM_DATA_PARALLEL_SIZE asks for {engines} engines"] if engines > 1 else []
    return Problem(
        Code.NO_GPU,
        f"{', '.join(asked)}, and {len(gpus)} {'GPU is' if len(gpus) == 1 else 'GPUs are'} visible: ask for "
        "fewer, or let the engine see more (docs/operations.md, several GPUs)",
    )


def gpu_recent(gpu: Gpu) -> Problem | None:
    """The kernels have code for the card."""
    if gpu.capability >= LEAST_CAPABILITY:
        return None
    has = ".".join(map(str, gpu.capability))
    return Problem(
        Code.GPU_TOO_OLD,
        f"{gpu.name} has compute capability {has}, and 8.0 (A100 and newer) is needed: choose another GPU "
        "with TANGRAM_GPU, or use the CPU image",
    )


def memory_free(gpu: Gpu, utilisation: float = UTILISATION) -> Problem | None:
    """Nobody else holds what vLLM wants; it refuses to start with less."""
    if gpu.free >= gpu.total * utilisation:  # both 0 where the driver does not tell
        return None
    share = int(gpu.free / gpu.total * 100) / 100
    return Problem(
        Code.TOO_LITTLE_MEMORY,
        f"{gpu.name} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free, and the engine wants "
        f"{utilisation:.0%} of all: end what else uses it (nvidia-smi shows it), or add "
        f"--gpu-memory-utilization {max(0.01, share - 0.02):.2f} to TANGRAM_ENGINE_ARGS",
    )


def memory_suffices(
    gpu: Gpu, facts: ModelFacts, config: TangramConfig, length: int | None, utilisation: float
) -> Problem | None:
    """The weights and one conversation of the greatest length fit, by the estimate of `tangram plan`."""
    spent = budget(Card(gpu.name, gpu.total), facts, utilisation)
    name, place = facts.shape.name, several(facts.shape.ranks, gpu.name)
    if spent.pool <= 0:
        return Problem(
            Code.TOO_LITTLE_MEMORY,
            f"{name} needs about {(spent.weights + spent.working) / GIB:.1f} GiB before any conversation, "
            f"and {spent.usable / GIB:.1f} GiB of {place} can be used: choose a smaller model with MODEL",
        )
    return _longest_fits(place, facts, config, length, spent.pool)


def host_memory_suffices(
    available: int, cache: int, facts: ModelFacts, config: TangramConfig, length: int | None
) -> Problem | None:
    """The same on a CPU: the weights, beside them the engine's cache, and in it one conversation."""
    name = facts.shape.name
    if facts.weight_bytes + cache > available:
        return Problem(
            Code.TOO_LITTLE_MEMORY,
            f"{name} needs about {facts.weight_bytes / GIB:.1f} GiB and its cache {cache / GIB:.1f}, and "
            f"this host has {available / GIB:.1f} GiB free: choose a smaller model with MODEL, or fewer GiB "
            "of cache in VLLM_CPU_KVCACHE_SPACE",
        )
    return _longest_fits("this host", facts, config, length, cache)


def _longest_fits(
    place: str, facts: ModelFacts, config: TangramConfig, length: int | None, pool: int
) -> Problem | None:
    plan = make_plan(facts, config, pool, length)
    if plan.fits:
        return None
    fit = length_that_fits(facts, config, pool, plan.max_model_len)
    advice = (
        f"add --max-model-len {fit} to TANGRAM_ENGINE_ARGS, or lower the retention (in the console, whose "
        "word wins, or TANGRAM_RETENTION)"
        if fit
        else "choose a smaller model with MODEL"
    )
    return Problem(
        Code.TOO_LITTLE_MEMORY,
        f"beside {facts.shape.name}, {place} has about {pool / GIB:.1f} GiB for conversations, and one of "
        f"the greatest length ({plan.max_model_len:,} tokens) does not fit: {advice}",
    )


def model_allowed(model: str, answer: HubAnswer, has_token: bool) -> Problem | None:
    """The hub lets us download the model."""
    if answer.state != "gated":
        return None
    what = "the token in HF_TOKEN may not read it" if has_token else "there is no token in HF_TOKEN"
    return Problem(
        Code.GATED_MODEL,
        f"{model} is gated and {what}: accept its licence on the hub with your account, then put a token of "
        "that account into HF_TOKEN",
    )


def clock_right(now: float, last_write: float, hub: float | None) -> Problem | None:
    """The clock agrees with what was written last, and with the hub's where that is known."""
    behind = last_write - now
    if behind > MOST_SKEW_SECONDS:
        return Problem(
            Code.CLOCK,
            f"the clock is {behind:,.0f} seconds behind the last write of the database: set the host's clock "
            "(timedatectl set-ntp true), or sign-ins and the order of messages go wrong",
        )
    if hub is not None and abs(now - hub) > MOST_SKEW_SECONDS:
        return Problem(
            Code.CLOCK,
            f"the clock is {abs(now - hub):,.0f} seconds {'ahead of' if now > hub else 'behind'} the model "
            "hub's: set the host's clock (timedatectl set-ntp true)",
        )
    return None
