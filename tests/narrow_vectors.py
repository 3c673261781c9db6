"""A plugin of pytest (`-p tests.narrow_vectors`): kernels are made for processors whose vectors hold eight floats."""

from covey import compiling

compiling.FLAGS = tuple("-march=haswell" if flag == "-march=native" else flag for flag in compiling.FLAGS)
assert "-march=haswell" in compiling.FLAGS
