"""A plugin of pytest (`-p tests.support.narrow_vectors`): kernels are
made for another processor, $COVEY_TEST_PROCESSOR, or one whose vectors hold eight floats."""

import os

from covey.policy.kernels import compiler

PROCESSOR = f"-march={os.environ.get('COVEY_TEST_PROCESSOR', 'haswell')}"
compiler.FLAGS = tuple(PROCESSOR if flag == "-march=native" else flag for flag in compiler.FLAGS)
assert PROCESSOR in compiler.FLAGS
