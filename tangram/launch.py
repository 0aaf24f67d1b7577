"""The API server's process: stock vLLM's, after one look at what it was asked for.

    python -m tangram.launch [any vLLM option]

vLLM first builds its whole configuration, wherever the options came from (arguments, a --config file, the
model's own files), and what the ragged cache cannot serve ends here, before a model is loaded, with one line.
What only a loaded model shows is refused by the engine's processes; then their sentence is the last line.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tangram.errors import TangramError
from tangram.reasons import VARIABLE, reason
from tangram.runtime import Runtime

USAGE_ERROR = 2


def check(arguments: Sequence[str]) -> None:
    """Raise TangramError when vLLM, started with these options, would have to be refused. What vLLM itself
    does not accept is left to vLLM, which is about to say so."""
    cli_env_setup()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception:
        return
    Runtime.from_vllm(config)


def main() -> int:
    """Serve until told to stop. Returns the exit status: 2 for what cannot be served."""
    with tempfile.TemporaryDirectory(prefix="tangram-") as folder:
        told = Path(folder) / "reason"
        os.environ[VARIABLE] = str(told)
        try:
            check(sys.argv[1:])
            entry.main()
        except TangramError as error:
            print(f"tangram: error: {error}", file=sys.stderr)
            return USAGE_ERROR
        except Exception:
            if not reason(told):
                raise
            traceback.print_exc()
            print(f"tangram: error: {reason(told)}", file=sys.stderr)
            return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
