"""`python -m isotype` is the command `isotype`."""

from __future__ import annotations

import sys

from isotype.cli.main import main

sys.exit(main())
