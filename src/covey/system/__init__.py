"""Processes, disks, clocks and text: nothing of GRPO."""
