"""``tangram``: the plugin's command line.

``tangram serve MODEL [any vLLM option]`` starts stock vLLM's API server with the ragged cache; options of our
own start with ``--tangram-``. ``tangram calibrate`` makes a profile, ``tangram profile`` looks at one
or completes it, ``tangram evaluate`` tries one on its model, ``tangram plan`` says what fits a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import NoReturn

from tangram import profile_command, shipped
from tangram.calibration import command as calibrate_command
from tangram.calibration import evaluate_command
from tangram.config import HELP, KEY, TangramConfig
from tangram.errors import ConfigError, TangramError, Unreachable
from tangram.host import cpu_cache_bytes, cpu_threads, memory_nodes
from tangram.hub import check_reachable, local_path
from tangram.naming import as_asked, option, variable
from tangram.plan import command as plan_command
from tangram.plugin import CPU_WORKER, ENABLE_VARIABLE, SCHEDULER

USAGE_ERROR = 2
FAILURE = 1
POLLED = ("/health", "/metrics", "/tangram/memory", "/tangram/status", "/tangram/profile")
"""Routes that are asked every few seconds: they would fill the log."""
ACCESS_LOG_OPTIONS = ("--disable-access-log-for-endpoints", "--disable-uvicorn-access-log")
CACHE_SIZE_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
COMPILATION_OPTIONS = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc")
TENSOR_OPTIONS = ("--tensor-parallel-size", "-tp")
DATA_OPTIONS = ("--data-parallel-size", "-dp")
RESHAPING_OPTIONS = ("--hf-overrides", "--hf-config-path")
"""With these the model may have other heads than its files say: no profile is chosen for it."""
THREADS_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
API_SERVER = "tangram.launch"


class Parser(argparse.ArgumentParser):
    """Ends with one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"tangram: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``tangram``. Options it does not know are vLLM's."""
    parser = Parser(
        prog="tangram", description="Serve chat models with a KV cache that keeps what each head needs."
    )
    parser.add_argument("--version", action="version", version=f"tangram {own_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start vLLM's OpenAI-compatible server with the ragged cache",
        description="Start stock vLLM's OpenAI-compatible server with the ragged cache.",
        epilog="Every other option is vLLM's own. Each --tangram-FIELD can also be set as TANGRAM_FIELD in "
        "the environment; the option wins.",
        allow_abbrev=False,
    )
    serve.add_argument("model", metavar="MODEL", help="a directory or a hub id, as for vllm serve")
    for field in fields(TangramConfig):
        default = "auto" if field.name == "group_size" else field.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        serve.add_argument(
            option(field.name),
            dest=field.name,
            metavar=field.name.upper(),
            help=HELP[field.name] + ("" if default is None else f" (default {default})"),
        )
    calibrate_command.add_to(commands)
    profile_command.add_to(commands)
    evaluate_command.add_to(commands)
    plan_command.add_to(commands)
    return parser


def own_version() -> str:
    """The installed release, or "unknown" when run from a bare checkout."""
    try:
        return version("tangram-chat")
    except PackageNotFoundError:
        return "unknown"


def vllm_command(model: str, config: TangramConfig, extra: Sequence[str], on_cpu: bool) -> list[str]:
    """The command that starts vLLM's API server.

    Args:
        extra: the user's own vLLM options; ours are added, and an option that contradicts ours is refused.
        on_cpu: vLLM on a CPU has one backend slot, which the plugin takes; elsewhere it is asked for by name.
    """
    extra = list(extra)
    model = local_path(model)
    if _value(extra, "--block-size") not in (None, str(config.page_tokens)):
        raise ConfigError(
            "page_tokens",
            f"is {config.page_tokens}; use {option('page_tokens')} instead of vLLM's --block-size",
        )
    for name in ("--attention-backend", "--scheduler-cls"):
        if _value(extra, name) is not None:
            raise ConfigError(name, "is set by tangram serve: leave it out")
    if any(_name(argument).startswith("--additional-config.") for argument in extra):
        raise ConfigError("--additional-config", "must be one JSON object: its parts would replace ours")
    additional = _take(extra, "--additional-config")
    try:
        merged = json.loads(additional) if additional else {}
        if not isinstance(merged, dict):
            raise ValueError
    except ValueError:
        raise ConfigError("--additional-config", f"must be a JSON object, not {additional!r}") from None
    merged[KEY] = config.to_dict()
    # Ours come last, and so win over a spelling of theirs that only vLLM knows, such as an abbreviation.
    command = [sys.executable, "-m", API_SERVER, "--model", model, *extra]
    command += ["--block-size", str(config.page_tokens), "--scheduler-cls", SCHEDULER]
    command += cpu_options(extra, os.environ) if on_cpu else ["--attention-backend", "CUSTOM"]
    command += ["--enable-prompt-tokens-details", "--additional-config", json.dumps(merged)]
    if not any(_value(extra, name) is not None for name in ACCESS_LOG_OPTIONS):
        command += [ACCESS_LOG_OPTIONS[0], ",".join(POLLED)]
    return command


def cpu_options(extra: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What an engine on a CPU needs beyond vLLM's defaults, unless the user decided: a cache that fits, a
    worker whose seeds survive a cut prompt, and no compilation, which made a start three times as long and
    decoding a fifth faster (docs/architecture.md).
    """

    def given(*names: str) -> bool:
        return any(_value(extra, name) is not None for name in names)

    options = []
    if not environment.get("VLLM_CPU_KVCACHE_SPACE") and not given(*CACHE_SIZE_OPTIONS):
        share = engines_of(extra) * ranks_of(extra)
        options += ["--kv-cache-memory-bytes", str(cpu_cache_bytes(share))]
    if not given(*COMPILATION_OPTIONS):
        options += ["--enforce-eager"]
    if not given("--worker-cls"):
        options += ["--worker-cls", CPU_WORKER]
    return options


def engines_of(extra: Sequence[str]) -> int:
    """Those of data parallelism; 1 where vLLM is to judge what was asked for."""
    return _number(extra, DATA_OPTIONS)


def ranks_of(extra: Sequence[str]) -> int:
    """Those of tensor parallelism, in each engine; 1 where vLLM is to judge what was asked for."""
    return _number(extra, TENSOR_OPTIONS)


def _number(extra: Sequence[str], names: Sequence[str]) -> int:
    values = [value for name in names if (value := _value(extra, name)) is not None]
    return max(1, int(values[-1])) if values and values[-1].isdecimal() else 1


def _name(argument: str) -> str:
    """The option in an argument, with dashes where vLLM takes underscores as well."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _find(arguments: Sequence[str], name: str) -> int | None:
    return next((index for index, argument in enumerate(arguments) if _name(argument) == name), None)


def _value(arguments: Sequence[str], name: str) -> str | None:
    index = _find(arguments, name)
    if index is None:
        return None
    if "=" in arguments[index]:
        return arguments[index].partition("=")[2]
    return arguments[index + 1] if index + 1 < len(arguments) else ""


def _take(arguments: list[str], name: str) -> str | None:
    value, index = _value(arguments, name), _find(arguments, name)
    if index is not None:
        del arguments[index : index + (1 if "=" in arguments[index] else 2)]
    return value


def vllm_environment(environment: dict[str, str], cpu_workers: int = 1) -> dict[str, str]:
    """The environment of the engine: the plugin enabled, and named so that vLLM loads its routes.

    vLLM loads endpoint plugins only when VLLM_PLUGINS names them, and then nothing that it does not name: so
    all that would have loaded without it are named too.

    Args:
        cpu_workers: of all engines and their ranks on a CPU, whose threads must be shared out.
    """
    named = environment.get("VLLM_PLUGINS")
    others = (
        named.split(",") if named else [point.name for point in entry_points(group="vllm.general_plugins")]
    )
    names = list(dict.fromkeys([*others, "tangram"]))
    changed = {"VLLM_PLUGINS": ",".join(names), ENABLE_VARIABLE: "1"}
    threads = cpu_threads(cpu_workers, sorted(os.sched_getaffinity(0)), memory_nodes())
    if threads is not None and not environment.get(THREADS_VARIABLE):
        changed[THREADS_VARIABLE] = threads
    return environment | changed


def serve(arguments: argparse.Namespace, extra: Sequence[str]) -> NoReturn:
    """Replace this process by vLLM's API server."""
    options = {field.name: getattr(arguments, field.name) for field in fields(TangramConfig)}
    given = {name: value for name, value in options.items() if value is not None}
    # What an option overrides is nobody's any more: messages name the source that counts.
    overridden = {variable(name) for name in given}
    environment = {name: value for name, value in os.environ.items() if name not in overridden}
    try:
        config = TangramConfig.from_sources(given, environment)
        local_path(arguments.model)
        try:
            if _value(extra, "--hf-config-path") is None:
                check_reachable(arguments.model, _value(extra, "--revision"))
            from vllm.platforms import current_platform
        except ImportError as error:
            sentence = f"vLLM 0.32 is not installed here ({error}): pip install vllm==0.32.0"
            raise TangramError(sentence) from None
        reshaped = any(_value(extra, name) is not None for name in RESHAPING_OPTIONS)
        settled = shipped.settled(config, local_path(arguments.model), _value(extra, "--revision"), reshaped)
        if sentence := shipped.told(config, settled):
            print(f"tangram: {sentence}", file=sys.stderr)
        command = vllm_command(arguments.model, settled, extra, current_platform.is_cpu())
    except Unreachable:
        raise
    except ConfigError as error:
        raise as_asked(error, given, environment) from None
    sys.stdout.flush()
    workers = engines_of(extra) * ranks_of(extra) if current_platform.is_cpu() else 1
    os.execve(command[0], command, vllm_environment(environment, workers))


def ours_with_dashes(argument: str) -> str:
    """``--tangram_page_tokens=16`` as ``--tangram-page-tokens=16``: vLLM is as lenient with its own."""
    name, equals, value = argument.partition("=")
    ours = name.replace("_", "-")
    return f"{ours}{equals}{value}" if ours.startswith("--tangram-") else argument


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tangram``. Returns the exit status: 2 for a usage or configuration error, 1 where another try may
    succeed."""
    given = [ours_with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    arguments, extra = build_parser().parse_known_args(given)
    unknown = [name for name in extra if name.startswith("--tangram-")]
    try:
        if arguments.command != "serve":
            if extra:
                raise ConfigError(extra[0], f"is no option of tangram {arguments.command}; see its --help")
            return int(arguments.run(arguments))
        if unknown:
            raise ConfigError(unknown[0], "is no option of tangram serve; see tangram serve --help")
        serve(arguments, extra)
    except TangramError as error:
        print(f"tangram: error: {error}", file=sys.stderr)
        return FAILURE if isinstance(error, Unreachable) else USAGE_ERROR
