"""How long a step takes beside other libraries and the machine's floor: `python -m benchmarks table | curves | gpu`."""
