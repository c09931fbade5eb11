"""Measurements on a GPU: the full model against eager PyTorch, and its latency beside rivals. Not part of the package."""
