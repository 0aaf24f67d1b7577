"""The API server's process: stock vLLM's, after one look at what it was asked for.

    python -m tangram.launch [any vLLM option]

What the options alone show to be impossible ends here at once. Then vLLM builds its whole configuration,
wherever the options came from (arguments, a --config file, the model's own files), and what the ragged cache
cannot serve, or vLLM itself refuses, ends before a model is loaded, with one line. What only a loaded model
shows is refused by the engine's processes; then their sentence is the last line.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args, init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kernels import implementation
from kernels.errors import KernelError
from tangram.argument_support import check_arguments
from tangram.errors import ConfigError, TangramError
from tangram.hub import not_a_model
from tangram.naming import as_asked
from tangram.reasons import FAILED, VARIABLE, listen, plain, reason, why
from tangram.runtime import Runtime
from tangram.summary import prediction_of, summary

USAGE_ERROR = 2
FAILURE = 1

# vLLM shows what is logged below its own name only.
logger = init_logger("vllm.tangram")


class Parser(FlexibleArgumentParser):
    """vLLM's, which would print all of its options before each complaint."""

    def error(self, message: str) -> NoReturn:
        """Raise TangramError."""
        raise TangramError(
            f"{' '.join(message.split())} (see tangram serve --help, and vllm serve --help=all)"
        )


def check(arguments: Sequence[str]) -> None:
    """Raise TangramError, whose text is one line, when vLLM, started with these options, would have to be
    refused or itself refuses. Otherwise log what the cache will be like."""
    cli_env_setup()
    parsed = parse(arguments)
    check_arguments(parsed)
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except TangramError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError | OSError | NotImplementedError):
            traceback.print_exc()
        raise TangramError(not_a_model(parsed.model, error) or why(error)) from None
    try:
        _report(config)
    except ConfigError as error:
        raise as_asked(error, (), os.environ) from None
    except KernelError as error:
        raise TangramError(plain(error)) from None


def _report(config: VllmConfig) -> None:
    """Log how the cache will be cut. Raises TangramError for what it cannot serve."""
    own = Runtime.from_vllm(config)
    prediction = prediction_of(own)
    device = config.device_config.device
    # The worker knows which kernels a GPU runs; this process leaves the GPU alone.
    kernels = implementation(device) if device.type == "cpu" else "cuda"
    each, engines = config.cache_config.kv_cache_memory_bytes, config.parallel_config.data_parallel_size
    pool = None if each is None else each * own.geometry.ranks
    logger.info("%s", summary(own, prediction, kernels, pool, engines))
    for warning in prediction.warnings:
        logger.warning("Ragged cache: %s", warning)


def parse(arguments: Sequence[str]) -> Namespace:
    """vLLM's options, checked as vLLM does before it starts. Raises TangramError."""
    try:
        parsed = make_arg_parser(Parser()).parse_args(list(arguments))
        configure_logging_from_args(parsed)
        validate_parsed_serve_args(parsed)
    except (ValueError, TypeError, OSError) as error:
        raise TangramError(f"vLLM refuses this: {plain(error).removeprefix('Error: ')}") from None
    return parsed


def main() -> int:
    """Serve until told to stop. Returns the exit status: 2 for what cannot be served, 1 for what failed
    and may not fail again."""
    with tempfile.TemporaryDirectory(prefix="tangram-") as folder:
        told = Path(folder) / "reason"
        os.environ[VARIABLE] = str(told)
        # Python's keeper of shared memory would speak last, of what vLLM left behind when its start failed.
        # It is a process of its own that takes these options over.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        listen()
        try:
            check(sys.argv[1:])
            entry.main()
        except TangramError as error:
            print(f"tangram: error: {error}", file=sys.stderr)
            return USAGE_ERROR
        except Exception as error:
            traceback.print_exc()
            known = reason(told)
            print(f"tangram: error: {known or why(error)}", file=sys.stderr)
            return USAGE_ERROR if known and not known.startswith(FAILED) else FAILURE
    return 0


if __name__ == "__mp_main__":  # a process of the engine, which begins with a look at this module
    listen()

if __name__ == "__main__":
    sys.exit(main())
