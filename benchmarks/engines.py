"""The engines that the serving benchmarks compare, and what a process does that runs one of them.

A benchmark's parent process starts one child for each engine, one after another, and reads its answers, one
JSON value a line. A child becomes one engine, by the options given here, and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tangram.config import TangramConfig
    from tangram.geometry import Geometry
    from tangram.profile import Profile

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"stock": None, "tangram 1.0": 1.0, "tangram 0.5": 0.5, "tangram 0.25": 0.25}
"""Name to retention; None for vLLM without the plugin. A name may go on with settings of the plugin:
"tangram 0.25 chunk=256"."""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
"""The shape of Qwen3-4B."""
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
"""What makes of it something that starts anywhere."""
NEEDS = (0.04, 0.06, 0.09, 0.14, 0.2, 0.3, 0.47, 0.7)
"""Shares that heads need, spread like calibrated ones around a mean of a quarter."""


# ---- the parent -------------------------------------------------------------------------------------------


def write_model(folder: Path, tiny: bool, positions: int = 40960) -> dict[str, Any]:
    """Write a model's configuration and, beside it, a profile of its heads, for ``load_format=dummy``.
    Returns the configuration."""
    config = MODEL | (TINY if tiny else {}) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    spread_profile(config).save(folder / "profile.json")
    return config


def spread_profile(config: dict[str, Any]) -> Profile:
    """A profile whose heads need very different shares, in an order that has no pattern: so tiers differ in
    size, and their heads are scattered over the layers, as with a calibrated profile. Its mean queries are
    random, as the model's weights are: with them the engine does what it does with a calibrated one."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tangram.identity import ModelIdentity, config_fingerprint
    from tangram.profile import Profile
    from tangram.profile_file import Calibration, as_matrix

    layers, kv_heads, width = (
        int(config[name]) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    count = layers * kv_heads
    needs = [NEEDS[index * len(NEEDS) // count] for index in range(count)]
    random.Random(0).shuffle(needs)
    mean = as_matrix(needs[layer * kv_heads : (layer + 1) * kv_heads] for layer in range(layers))
    draw = random.Random(1)
    queries = ([[draw.gauss(0, 1) for _ in range(width)] for _ in range(kv_heads)] for _ in range(layers))
    stated: dict[str, Any] = {"oracle": "stated", "scope": "model", "retention": 0.25, "alpha": 1.0}
    stated |= {"length": 0, "seed": 0, "data": "none", "dtype": config["torch_dtype"], "window": 0, "sink": 0}
    model = ModelIdentity(
        name="random weights",
        architecture=config["architectures"][0],
        layers=layers,
        kv_heads=kv_heads,
        head_size=width,
        dtype=config["torch_dtype"],
        itemsize=2,
        max_model_len=config["max_position_embeddings"],
        config_hash=config_fingerprint(SimpleNamespace(**config)),
        weights_hash=None,
        tokenizer="none",
        tokenizer_hash="none",
    )
    calibration = Calibration(
        model=model,
        settings=stated,
        samples=1,
        samples_hash="none",
        created="stated",
        tool="benchmark",
        least=mean,
        most=mean,
        needs=(mean,),
        mean_queries=tuple(as_matrix(layer) for layer in queries),
    )
    none = as_matrix([[0.0] * kv_heads] * layers)
    return Profile(mean, none, floor=0.04, source="spread for a benchmark", calibration=calibration)


def kv_bytes(config: dict[str, Any], itemsize: int = 2) -> int:
    """Bytes of the full cache's keys and values of one token."""
    return int(
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize
    )


def parts_of(engine: str) -> tuple[float | None, dict[str, Any]]:
    """Retention, and further settings of the plugin, by an engine's name. Raises ValueError for others."""
    name, *settings = re.split(r" (?=[a-z_]+=)", engine)
    if name not in ENGINES or (settings and name == "stock"):
        raise ValueError(f"{engine!r} is none of {', '.join(ENGINES)}, nor one of these with settings")
    pairs = (setting.split("=", 1) for setting in settings)
    return ENGINES[name], {key: int(value) if value.isdigit() else value for key, value in pairs}


def engine_name(text: str) -> str:
    """For argparse: a name that :func:`parts_of` knows."""
    try:
        parts_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def cache_of(
    engine: str, config: dict[str, Any], profile: str | None, max_model_len: int
) -> Callable[[float], float]:
    """Bytes that this engine's cache holds of a conversation between its turns, by its tokens. Needs no
    engine."""
    retention, settings = parts_of(engine)
    if retention is None:
        return lambda tokens: tokens * kv_bytes(config)
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from tangram.config import TangramConfig

    own = TangramConfig(retention=retention, profile=profile, **settings)
    geometry = geometry_of(own, config, max_model_len)
    return lambda tokens: geometry.idle_bytes(math.ceil(tokens))


def launched(engines: Sequence[str], ways: Sequence[str | None]) -> list[tuple[str, str | None]]:
    """Every engine, those of the plugin once for each way to launch decode attention."""
    return [(engine, way) for engine in engines for way in (ways if ENGINES[engine] is not None else [None])]


def geometry_of(own: TangramConfig, config: dict[str, Any], max_model_len: int) -> Geometry:
    """The plugin's cache of a model whose configuration is given. Needs no engine."""
    from tangram.profile import ModelShape, build_geometry

    shape = ModelShape(
        name="benchmark",
        layers=config["num_hidden_layers"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        itemsize=2,
        dtype="bfloat16",
        max_model_len=max_model_len,
    )
    return build_geometry(own, shape)


def child(script: str, job: dict[str, Any], folder: Path) -> Iterator[Any]:
    """The answers of one engine's process, as they come. Ends this program when the engine fails."""
    given = folder / "job.json"
    given.write_text(json.dumps(job))
    command = [sys.executable, script, "--worker", str(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(folder)) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        sys.exit(f"{job['engine']}: the engine ended with {process.returncode}")


def environment(folder: Path) -> dict[str, str]:
    """A child's: it imports this checkout, and vLLM finds the plugin although nothing was installed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "tangram" not in {point.name for point in points}:
        paths.insert(0, str(_metadata(folder / "plugin")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _metadata(folder: Path) -> Path:
    """What an installed package tells of itself: name and entry points, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"tangram_chat-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tangram-chat\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def ratio(value: float | None, base: float | None) -> float:
    """``value / base``; not a number where either is missing or the base is 0."""
    return value / base if value is not None and base else math.nan


def earlier(path: Path | None, join: bool, key: str, engines: Sequence[str]) -> list[dict[str, Any]]:
    """What a file already holds, if it is to be added to, of engines that do not run now."""
    if not join or path is None or not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))[key]
    return [row for row in rows if row["engine"] not in engines]


def write_json(path: Path | None, benchmark: str, arguments: dict[str, Any], **figures: Any) -> None:
    """Write a benchmark's figures and what it was asked for, to be drawn later."""
    if path is None:
        return
    asked = {name: value for name, value in arguments.items() if name not in {"json", "worker"}}
    report = {"benchmark": benchmark, "arguments": asked, **figures}
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


# ---- the child --------------------------------------------------------------------------------------------


def answers_channel() -> TextIO:
    """Where a child writes its answers. vLLM prints, so standard output becomes standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def plugin_options(
    retention: float | None, profile: str | None = None, own_core: bool = False, **settings: Any
) -> dict[str, Any]:
    """vLLM's options of an engine of this process, whose environment is set for it: before vLLM is loaded.
    ``own_core``: the engine's core is a process of its own, as the asynchronous engine's always is."""
    if not own_core:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PLUGINS"] = "tangram" if retention else ""
    if not retention:
        return {}
    os.environ["TANGRAM"] = "1"
    from tangram.config import TangramConfig

    config = TangramConfig(retention=retention, profile=profile, **settings)
    return {
        "scheduler_cls": "tangram.scheduler.TangramScheduler",
        "block_size": config.page_tokens,
        "additional_config": json.loads(config.to_json()),
    }


def engine_options(
    retention: float | None, profile: str | None = None, own_core: bool = False, **settings: Any
) -> dict[str, Any]:
    """The same, with the attention backend that a GPU needs to be told."""
    options = plugin_options(retention, profile, own_core, **settings)
    from vllm.platforms import current_platform

    if retention and not current_platform.is_cpu():
        options["attention_backend"] = "CUSTOM"
    if current_platform.is_cpu():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker in the core's process, as on a GPU
        if retention:
            options["worker_cls"] = "tangram.cpu_worker.TangramCPUWorker"
    return options


def device() -> str:
    """What the engine runs on, in words."""
    from vllm.platforms import current_platform

    return "CPU" if current_platform.is_cpu() else str(current_platform.get_device_name())
