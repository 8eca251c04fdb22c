"""torch's own optimizers on shards: their hooks, and where the job keeps their state.

Start with ``hooks.py``, then ``optimizer_state.py``. The step itself is torch's. Tests: ``tests/python/optimizers``.
"""
