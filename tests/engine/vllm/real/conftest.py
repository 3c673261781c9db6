"""Tiny models in a real vLLM, which runs on the CPU and talks to itself alone."""

import os

os.environ.update(
    VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", VLLM_LOGGING_LEVEL="ERROR"
)
