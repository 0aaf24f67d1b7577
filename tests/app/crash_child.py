"""The app, to be killed: imports everything once, then forks an app for each port that it is told.

python -m tests.app.crash_child HOME MODEL ENGINE_URL      ports on stdin, process ids on stdout
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import uvicorn

from app.factory import create_app
from app.guardian import die_with_parent
from app.settings import Settings


def serve(settings: Settings) -> None:
    """Run the app on its port until it is killed."""
    app = create_app(settings, chat_ui=False)
    uvicorn.run(app, host="127.0.0.1", port=settings.port, log_config=None, access_log=False)


def main() -> None:
    home, model, engine_url = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the killed ones are not waited for
    for line in sys.stdin:
        settings = Settings(home=Path(home), model=model, engine_url=engine_url, port=int(line))
        child = os.fork()
        if child == 0:
            die_with_parent()
            serve(settings)
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
