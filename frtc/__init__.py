"""frtc: an ahead-of-time compiler for realtime robot policies."""

__version__ = "0.1.0"
