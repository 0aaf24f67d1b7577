"""Run the CUDA kernels under compute-sanitizer's memcheck and racecheck: python scripts/sanitize_kernels.py

Needs a GPU, nvcc and the CUDA toolkit's compute-sanitizer. Each tool must first find a fault that is planted
in a small program, so that a tool that sees nothing is not taken for kernels that are right; then it watches
tests/kernels/test_cuda_small.py. Only kernels of ours are watched, and torch takes a piece of memory from the
driver for each tensor, so that an access beyond a tensor's end is one beyond allocated memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kernels.cuda.build import find_compiler  # noqa: E402
from kernels.errors import KernelBuildError  # noqa: E402

FOUND = 9  # compute-sanitizer's exit status where it found something
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
CASES = "tests/kernels/test_cuda_small.py"

# Without an argument a write behind the end of memory, with one a read of what another warp may yet write.
PLANTED = """
namespace tangram {
__global__ void planted(int* memory, int first, bool race) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  if (!race) __syncthreads();
  memory[first + threadIdx.x] = shared[63 - threadIdx.x];
}
}
int main(int count, char**) {
  const bool race = count > 1;
  int* memory;
  if (cudaMalloc(&memory, 64 * sizeof(int)) != cudaSuccess) return 2;
  tangram::planted<<<1, 64>>>(memory, race ? 0 : 64, race);
  cudaDeviceSynchronize();
  return 0;
}
"""


def watched(tool: str, program: list[str], timeout: float, **environment: str) -> tuple[int, str]:
    """Run a program under a tool: the exit status and everything that was said."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", "kernel_substring=tangram"]
    if tool == "memcheck":  # what torch asks the driver for in vain is no fault; a launch that fails raises
        options += ["--report-api-errors", "no"]
    try:
        done = subprocess.run(
            ["compute-sanitizer", *options, *program],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


def main() -> int:
    """Run the tools one after another; the exit status tells whether they found but what was planted."""
    parser = argparse.ArgumentParser(description="Run the CUDA kernels under compute-sanitizer.")
    parser.add_argument("--tools", nargs="+", choices=CLEAN, default=list(CLEAN))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one tool")
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("error: no compute-sanitizer on the path; it is a part of the CUDA toolkit", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "planted.cu", Path(directory) / "planted"
        source.write_text(PLANTED, encoding="utf-8")
        try:
            compiler = find_compiler()
        except KernelBuildError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        subprocess.run([*compiler, "-arch=native", str(source), "-o", str(program)], check=True)
        for tool in options.tools:
            race = ["race"] if tool == "racecheck" else []
            status, said = watched(tool, [str(program), *race], options.timeout)
            if status != FOUND:
                print(f"{tool}: did not find the planted fault (status {status})\n{said}")
                failed.append(tool)
                continue
            began = time.monotonic()
            cases = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "default", "-p", "no:cacheprovider"]
            # Without the project's settings: their plugins may not be there.
            cases += ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str((ROOT / CASES).parent)]
            status, said = watched(tool, [*cases, CASES], options.timeout, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            seconds = time.monotonic() - began
            print(f"{said[-6000:]}\n{tool}: status {status} after {seconds:.0f} s", flush=True)
            if status or CLEAN[tool] not in said or " passed" not in said or " skipped" in said:
                failed.append(tool)
    print(f"found something or did not run: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
