"""What knows nothing of GRPO: processes, disks, clocks, text."""
