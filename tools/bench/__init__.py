"""The measures of ``tools/bench_store.py``, one file a group of bars."""
