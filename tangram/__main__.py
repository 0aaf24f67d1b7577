"""``python -m tangram``."""

import sys

from tangram.cli import main

sys.exit(main())
