"""Imitates `tangram calibrate` for a script of samples: keeps a state, goes on from it, writes a profile.

    python fake_calibrate.py ACTIONS PROFILE --out FILE --samples N ...

ACTIONS: "quick", "slow" (waits in the second sample until it is ended), "refuse", "crash". PROFILE is copied
to FILE.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("actions")
    parser.add_argument("profile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int)
    options, others = parser.parse_known_args()
    print("options", *others, flush=True)
    if options.actions == "refuse":
        print("tangram: error: --length: must be at most 7\nand more", flush=True)
        return 2
    if options.actions == "crash":
        print("RuntimeError: out of memory", flush=True)
        return 1
    state = options.out.with_name(options.out.name + ".state")
    before = len(state.read_text()) if state.exists() else 0
    for number in range(1, options.samples + 1):
        new = number > before
        if new:
            if options.actions == "slow" and number == 2:
                time.sleep(600)
            with state.open("a") as file:
                file.write("x")
        about = {"done": number, "total": options.samples, "kind": "prose", "new": new}
        print("tangram-progress " + json.dumps(about), flush=True)
    shutil.copy(options.profile, options.out)
    state.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
