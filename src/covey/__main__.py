"""`python -m covey`, for launchers that start modules (torchrun -m covey train ...)."""

import sys

from covey.main import main

sys.exit(main())
