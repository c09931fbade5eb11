"""Robot policies as plain PyTorch modules with strict weight maps."""
