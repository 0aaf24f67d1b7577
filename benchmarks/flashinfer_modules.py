"""Compile the FlashInfer kernels that ``benchmarks/cuda_decode.py`` uses, on a machine without a GPU.

    python benchmarks/flashinfer_modules.py OUT [--arch 9.0a]
    python benchmarks/cuda_decode.py --flashinfer-modules OUT       where the GPU is

Needs flashinfer-python, ninja and the CUDA toolkit (CUDA_HOME where it is not beside the nvcc on the path).
OUT gets one library a kernel, 2.5 MB in all, at the place ``NAME/NAME.so`` where FlashInfer looks for kernels
that came with it. They fit the versions of FlashInfer and of apache-tvm-ffi that compiled them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def link_without_driver(folder: Path) -> None:
    """Let the linker find an empty libcuda, as there is no driver on a machine without a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so")], check=True)
    flags = os.environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{flags} -L{folder}".strip()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--arch", default="9.0a", help="architecture as FlashInfer names it (H100, H200: 9.0a)"
    )
    parser.add_argument("--work", type=Path, help="where to compile; by default OUT/.work")
    arguments = parser.parse_args()
    work = (arguments.work or arguments.out / ".work").resolve()
    # FlashInfer reads these when it is imported.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arguments.arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(work)
    # ninja may have come as a Python package of this environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    link_without_driver(work / "stubs")

    from flashinfer.jit import gen_batch_decode_module
    from flashinfer.prefill import _gen_batch_prefill_primary_module

    from benchmarks.peers import DECODE_MODULE

    for spec in (
        gen_batch_decode_module(*DECODE_MODULE),
        _gen_batch_prefill_primary_module("fa2", *DECODE_MODULE, False),
    ):
        start = time.perf_counter()
        spec.build()
        target = arguments.out / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, target)
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
