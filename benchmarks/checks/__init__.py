"""Whether it is right elsewhere: other architectures, one GPU, and the doctor on runs made sick."""
