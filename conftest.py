"""Tests run against the installed frtc where there is one, else against the checkout (PYTHONPATH=.)."""
