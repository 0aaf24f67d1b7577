"""``python -m kernels prebuild``: compile the native kernels ahead of their first use."""

from __future__ import annotations

import argparse
import sys

from kernels.cpu import build
from kernels.errors import KernelError


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels", description="Native kernels of ragged paging.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "prebuild", help="compile the kernels for this machine and print where the library is"
    )
    parser.parse_args()
    try:
        print(build.library())
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
