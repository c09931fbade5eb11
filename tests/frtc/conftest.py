"""Tests of this folder."""

from importlib.util import find_spec

# Machines with a GPU have what a robot needs, no readers of recordings (extra `data`): those tests are the CPU tier's.
collect_ignore = [] if find_spec("av") and find_spec("pyarrow") else ["test_dataset.py", "test_dataset_trust.py"]
