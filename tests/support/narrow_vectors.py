"""A plugin of pytest (`-p tests.support.narrow_vectors`): kernels are
made for processors whose vectors hold eight floats."""

from covey.policy.kernels import compiler

compiler.FLAGS = tuple("-march=haswell" if flag == "-march=native" else flag for flag in compiler.FLAGS)
assert "-march=haswell" in compiler.FLAGS
