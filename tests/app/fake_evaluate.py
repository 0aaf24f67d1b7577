"""Imitates `tangram evaluate`: tells progress, writes a result for the profiles that it was given.

    python fake_evaluate.py ACTIONS FILE FILE --out FILE ...

ACTIONS: "quick", "slow" (waits behind the first reading until it is ended), "refuse", "crash".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

FIGURES = {"right": 3, "asked": 6, "answer_loss": 2.0, "text_loss": 1.5}
APART = {"mean": -0.5, "low": -0.7, "high": -0.3}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("actions")
    parser.add_argument("profiles", nargs=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--settings", type=json.loads)
    options, others = parser.parse_known_args()
    print("options", *others, json.dumps(options.settings), flush=True)
    if options.actions == "refuse":
        print("tangram: error: MODEL: needs about 16.0 GiB of memory", flush=True)
        return 1
    if options.actions == "crash":
        print("RuntimeError: boom", flush=True)
        return 1
    for done in range(3):
        print("tangram-progress " + json.dumps({"done": done, "total": 2}), flush=True)
        if options.actions == "slow" and done == 1:
            time.sleep(600)
    hashes = [
        None if name == "none" else hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
        for name in options.profiles
    ]
    result = {
        "format": "tangram-evaluation",
        "version": 1,
        "created": "2026-11-30T12:00:00+00:00",
        "model": {"name": "m"},
        "settings": {"retention": options.settings["retention"], "alpha": options.settings["alpha"]},
        "dtype": "float32",
        "seconds": 2.0,
        "probe": {"passages": 4, "tokens": 1344},
        "everything": FIGURES,
        "profiles": [
            {"profile": Path(name).name, "file_hash": known, "scorer": "keyvalue"} | FIGURES
            for name, known in zip(options.profiles, hashes, strict=True)
        ],
        "difference": {"first_only": 1, "second_only": 1, "chance": 1.0}
        | {"answer_loss": APART, "text_loss": APART},
    }
    options.out.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
