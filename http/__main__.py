"""python -m stoker.http is the `stoker` command.

Runs on: loop.
"""

import sys

from .cli import main

sys.exit(main())
