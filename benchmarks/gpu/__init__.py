"""GPU check: measure and verify this code on a machine with CUDA (docs/guides/gpu.md)."""
