"""Rivals to time beside frtc: Pi0.5 written as fast as PyTorch allows, with the real shapes and random weights."""
