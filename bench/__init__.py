"""Measurements on a GPU: the full model against eager PyTorch, its latency beside rivals. Not part of the package."""
