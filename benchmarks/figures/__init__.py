"""Every picture of the README and the documentation, drawn from measured data: `python -m benchmarks.figures`."""
