"""Declares the Triton interpreter to be Triton's backend for CPUs, so that vLLM's V2 runner starts on one."""
