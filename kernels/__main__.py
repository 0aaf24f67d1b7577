"""``python -m kernels``: compile the native kernels ahead of their first use, and see what they take."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kernels.cpu import build
from kernels.cuda import build as cuda
from kernels.cuda import resources
from kernels.errors import KernelError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in cuda.ELEMENTS}


def architecture(text: str) -> str:
    """An architecture as nvcc names it, for argparse."""
    if not re.fullmatch(r"sm_\d+", text) or int(text[3:]) < 80:
        raise argparse.ArgumentTypeError(f"{text!r} is not an architecture from sm_80 on")
    return text


def element(text: str) -> torch.dtype:
    """An element type of the CUDA kernels, for argparse."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[text]


def head_size(text: str) -> int:
    """A head size that the CUDA kernels can be built for, for argparse."""
    if not text.isdecimal() or int(text) not in range(32, 257, 32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 32 up to 256")
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line. Options that name several things may also be repeated."""
    parser = argparse.ArgumentParser(prog="python -m kernels", description="Native kernels of ragged paging.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "prebuild", help="compile the CPU kernels for this machine and print where the library is"
    )
    gpu = commands.add_parser(
        "build-cuda", help="compile the CUDA kernels, which needs nvcc but no GPU, and print where they are"
    )
    gpu.add_argument("--out", type=Path, help="directory for them; by default the kernel cache")
    gpu.add_argument("--jobs", type=int, help="compilers at a time; by default one for each processor")
    taken = commands.add_parser(
        "cuda-resources", help="print what the CUDA kernels take of a multiprocessor; needs nvcc but no GPU"
    )
    for command in (gpu, taken):
        several: dict[str, Any] = {"nargs": "+", "action": "extend"}
        command.add_argument("--arch", type=architecture, metavar="sm_NN", **several)
        command.add_argument("--dtype", type=element, metavar="TYPE", help=" or ".join(DTYPES), **several)
        command.add_argument("--head-size", type=head_size, metavar="N", **several)
    return parser.parse_args(arguments)


def chosen_variants(options: argparse.Namespace) -> list[cuda.Variant]:
    """What the options ask for; everything that is built ahead, where they do not."""
    return cuda.variants(
        options.arch or ["sm_80", "sm_90"],
        options.dtype or cuda.ELEMENTS,
        options.head_size or cuda.HEAD_SIZES,
    )


def build_cuda(options: argparse.Namespace) -> None:
    """Build the variants: paths go to the standard output, progress to the error output."""
    variants, began = chosen_variants(options), time.monotonic()
    for count, (variant, path) in enumerate(cuda.libraries(variants, options.out, options.jobs), start=1):
        print(path, flush=True)
        seconds = time.monotonic() - began
        print(f"{count} of {len(variants)}: {variant}, after {seconds:.0f} s", file=sys.stderr, flush=True)


def show_resources(options: argparse.Namespace) -> None:
    """One line for each kernel of each variant."""
    for variant in chosen_variants(options):
        for of in resources.usage(variant):
            print(
                f"{variant!s:22} {of.kernel:16} {of.registers:4} registers {of.stack:5} B stack"
                f" {of.spill_stores:5} B spilled {of.spill_loads:5} B reloaded"
            )


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse()
    try:
        if options.command == "prebuild":
            print(build.library())
        elif options.command == "build-cuda":
            build_cuda(options)
        else:
            show_resources(options)
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
