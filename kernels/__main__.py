"""``python -m kernels prebuild`` and ``build-cuda``: compile the native kernels ahead of their first use."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from kernels.cpu import build
from kernels.cuda import build as cuda
from kernels.errors import KernelError


def architecture(text: str) -> str:
    """An architecture as nvcc names it, for argparse."""
    if not re.fullmatch(r"sm_\d+", text) or int(text[3:]) < 80:
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture from sm_80 on")
    return text


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels", description="Native kernels of ragged paging.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "prebuild", help="compile the CPU kernels for this machine and print where the library is"
    )
    gpu = commands.add_parser(
        "build-cuda", help="compile the CUDA kernels, which needs nvcc but no GPU, and print where they are"
    )
    gpu.add_argument("--arch", nargs="+", type=architecture, default=["sm_80", "sm_90"], metavar="sm_NN")
    gpu.add_argument("--out", type=Path, help="directory for them; by default the kernel cache")
    chosen = parser.parse_args()
    try:
        if chosen.command == "prebuild":
            print(build.library())
        else:
            for variant in cuda.variants(chosen.arch):
                print(cuda.library(variant, into=chosen.out))
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
