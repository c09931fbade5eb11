"""`python -m frtc`: the command line."""

import sys

from frtc.cli import main

sys.exit(main())
