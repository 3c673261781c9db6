"""python -m benchmarks.demo: see arithmetic.py."""

import sys

from benchmarks.demo.arithmetic import main

if __name__ == "__main__":
    sys.exit(main())
