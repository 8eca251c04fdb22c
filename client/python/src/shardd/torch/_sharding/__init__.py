"""Public classes and functions that shard: ``fully_shard``, ``FullyShardedDataParallel``, and what becomes of their arguments.

Start with ``fully_shard.py`` (DTensors) and ``wrapper.py`` (flat parameters). What they put on a module is in ``_units``, and
the job follows with the first use, in ``_job``. Tests: ``tests/python/sharding``.
"""
