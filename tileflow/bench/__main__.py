"""Entry point of ``python -m tileflow.bench``."""

import sys

from .runner import main

sys.exit(main())
