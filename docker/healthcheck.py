"""Exit status 0 when the product answers that it is ready: the container's health check."""

import os
import sys
import urllib.request

try:
    url = f"http://127.0.0.1:{os.environ.get('TANGRAM_PORT', '8000')}/health/ready"
    with urllib.request.urlopen(url, timeout=4) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    print(f"not ready: {error}", file=sys.stderr)  # noqa: T201 - Docker keeps it with the health state
    sys.exit(1)
