"""`python -m stitch`: the same as the command `stitch`."""

import sys

from stitch.cli import main

sys.exit(main())
