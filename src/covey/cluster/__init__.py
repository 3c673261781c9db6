"""Training over several processes and machines: the only room that imports Ray."""
