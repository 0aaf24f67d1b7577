"""The whole preflight: asks, judges, and chooses a model that fits where none was named."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from app.preflight import checks
from app.preflight.probes import Gpu, Host, HubAnswer
from app.preflight.problems import PreflightFailed, Problem
from app.preflight.stored import tuned
from app.settings import Settings
from tangram.config import TangramConfig
from tangram.errors import TangramError
from tangram.plan.cards import GIB, Card
from tangram.plan.facts import ModelFacts, read_facts
from tangram.plan.sizing import UTILISATION, budget, length_that_fits

LARGE_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
SMALL_MODEL = "Qwen/Qwen3-0.6B"
LARGE_CARD = 22 * GIB
"""Cards sold with 24 GB report a little less."""
DEFAULT_LENGTH = 32768
"""Greatest length of a conversation with a model that was chosen here, where it fits."""

LIBRARY = ("libnuma.so.1", "libnuma1")
"""What vLLM's build for the CPU wants of the system, and the package that has it."""

CACHES = ("HF_HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT")
"""Variables that name directories for what is downloaded, and for what is compiled."""

Say = Callable[[str], None]


def prepare(
    settings: Settings,
    say: Say,
    host: Host | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings to start with; the cache's are those that the console stored, else the
    environment's. Raises PreflightFailed; with `preflight` "warn" problems are only said."""
    host = host or Host()
    if settings.preflight == "off":
        return settings
    problems: list[Problem | None] = [
        checks.writable(folder, host.user(), host.write_error(folder))
        for folder in _written(settings, environment)
    ]
    if settings.metrics_port:
        problems.append(checks.port_free(settings.metrics_port, host.port_error(settings.metrics_port)))
    if settings.postgres is not None:
        problems.append(checks.database_usable(host.database_error(settings.postgres)))
    hub: HubAnswer | None = None
    if settings.engine_url:
        pass  # an engine that runs elsewhere has its own GPU and model
    elif settings.expect_gpu:
        settings, found, hub = _for_gpu(settings, say, host, environment)
        problems += found
    else:
        hub = _ask_hub(settings.model, host, environment, problems)
        if not settings.engine_command:
            problems.append(checks.library_there(*LIBRARY, host.has_library(LIBRARY[0])))
            problems.append(_memory_of_host(settings, host, environment, hub))
    clock = hub.clock if hub else None
    # A file that was moved to PostgreSQL, whose last write says nothing any more, is not asked.
    written = 0.0 if settings.postgres is not None else host.last_write(settings.database_path)
    problems.append(checks.clock_right(host.now(), written, clock))
    real = [problem for problem in problems if problem is not None]
    for problem in real:
        say(f"{'warning' if settings.preflight == 'warn' else 'error'}: {problem.text}")
    if real and settings.preflight != "warn":
        raise PreflightFailed(real)
    return settings


def _for_gpu(
    settings: Settings, say: Say, host: Host, environment: Mapping[str, str]
) -> tuple[Settings, list[Problem | None], HubAnswer | None]:
    gpus = _visible(host.gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return settings, [checks.gpu_visible(gpus)], None
    asked = _engine_options(settings.engine_args)
    ranks = asked.tensor_parallel_size
    utilisation = asked.gpu_memory_utilization or UTILISATION
    wanted = ranks * settings.data_parallel_size
    if len(gpus) < wanted:
        return settings, [checks.gpus_enough(gpus, ranks, settings.data_parallel_size)], None
    used = gpus[:wanted]  # vLLM takes the first ones that it sees
    gpu = min(used, key=lambda one: one.total)
    problems = [checks.driver_recent(gpu)]
    for one in used:
        problems += [checks.gpu_recent(one), checks.memory_free(one, utilisation)]
    if gpu.total and not settings.model:
        return *_choose(settings, gpu, utilisation, say, host, environment, problems), None
    hub = _ask_hub(settings.model, host, environment, problems)
    if not gpu.total or not settings.model:  # the card shares the host's memory: vLLM measures what there is
        return settings, problems, hub
    facts = None if hub and hub.state in ("gated", "missing") else _facts(settings.model, ranks)
    config = _config(settings, environment)
    if facts and config and not asked.kv_cache_memory_bytes and _length_is_clear(asked.max_model_len):
        length = int(asked.max_model_len) if asked.max_model_len else None
        problems.append(checks.memory_suffices(gpu, facts, config, length, utilisation))
    return settings, problems, hub


def _memory_of_host(
    settings: Settings, host: Host, environment: Mapping[str, str], hub: HubAnswer | None
) -> Problem | None:
    """Whether the model and a conversation fit without a GPU; the bundled model, which is small, does."""
    asked = _engine_options(settings.engine_args)
    given = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not settings.model or asked.kv_cache_memory_bytes or not _length_is_clear(asked.max_model_len):
        return None
    if (hub and hub.state != "ok") or (given and not given.isdigit()):
        return None
    facts, config = _facts(settings.model), _config(settings, environment)
    if facts is None or config is None:
        return None
    available, cache = host.memory()
    length = int(asked.max_model_len) if asked.max_model_len else None
    ranks = settings.data_parallel_size  # each has the model and a cache of its own
    cache = int(given) * GIB if given and int(given) else cache // ranks
    return checks.host_memory_suffices(available // ranks, cache, facts, config, length)


def _length_is_clear(asked: str | None) -> bool:
    """Whether --max-model-len is left out or a number: "auto", "32k" and the like are vLLM's to read."""
    return not asked or asked.isdigit()


def _written(settings: Settings, environment: Mapping[str, str]) -> list[Path]:
    """Directories that are written: the data, and what may lie in volumes of their own."""
    found = [settings.home]
    if not settings.engine_url:
        offline = environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
        names = CACHES[1:] if offline else CACHES  # models that were carried here may lie read-only
        found += [] if settings.model else [settings.models_dir]
        found += [Path(environment[name]) for name in names if environment.get(name)]
    return list(dict.fromkeys(found))


def _visible(gpus: list[Gpu], asked: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; nvidia-smi shows all. What cannot be read here,
    such as a part of a card, is left to vLLM."""
    if asked is None:
        return gpus
    found = []
    for word in asked.split(","):
        name = word.strip()
        one = [gpu for gpu in gpus if name == str(gpu.index) or (name and gpu.uuid.startswith(name))]
        if not one:  # CUDA too ends at the first that is none
            break
        found += one[:1]
    return gpus if not found and asked.startswith("MIG-") else found


def _ask_hub(
    model: str, host: Host, environment: Mapping[str, str], problems: list[Problem | None]
) -> HubAnswer | None:
    """What the hub says of a model that is not here; None where it need not be asked."""
    if not model or Path(model).expanduser().exists() or host.downloaded(model):
        return None
    answer = host.hub(model)
    problems.append(checks.model_allowed(model, answer, bool(environment.get("HF_TOKEN"))))
    return answer


def _choose(
    settings: Settings,
    gpu: Gpu,
    utilisation: float,
    say: Say,
    host: Host,
    environment: Mapping[str, str],
    problems: list[Problem | None],
) -> tuple[Settings, list[Problem | None]]:
    """A model for a card, with a length that fits. The bundled one where the hub cannot be reached."""
    model = LARGE_MODEL if gpu.total >= LARGE_CARD else SMALL_MODEL
    if not host.downloaded(model) and host.hub(model).state != "ok":
        say(f"no MODEL is set and the hub cannot be reached for {model}: serving the small bundled model")
        return settings, problems
    facts = _facts(model, _engine_options(settings.engine_args).tensor_parallel_size)
    config = _config(settings, environment)
    if facts is None or config is None:
        return settings, problems
    words = ""
    if "--max-model-len" not in settings.engine_args:
        pool = budget(Card(gpu.name, gpu.total), facts, utilisation).pool
        limit = min(DEFAULT_LENGTH, facts.shape.max_model_len)
        words = f" --max-model-len {length_that_fits(facts, config, pool, limit) or limit}"
    say(f"no MODEL is set: {model} for {gpu.name} ({gpu.total / GIB:.0f} GiB){words}")
    changed = {"model": model, "engine_args": settings.engine_args + words}
    return settings.model_copy(update=changed), problems


def _facts(model: str, ranks: int = 1) -> ModelFacts | None:
    try:
        return read_facts(model, ranks=ranks)
    except TangramError:
        return None  # the engine will say what is wrong with it


def _config(settings: Settings, environment: Mapping[str, str]) -> TangramConfig | None:
    try:
        return TangramConfig.from_sources(
            {**tuned(settings.database_path, settings.postgres), "profile": "none"}, environment
        )
    except TangramError:
        return None


def _engine_options(arguments: str) -> argparse.Namespace:
    """Those of vLLM's options that decide about memory. What cannot be read is left to vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max-model-len")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--gpu-memory-utilization", type=float)
    try:
        return parser.parse_known_args(shlex.split(arguments))[0]
    except argparse.ArgumentError:
        return parser.parse_args([])
