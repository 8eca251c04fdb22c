"""Public classes and functions that shard: ``fully_shard``, ``FullyShardedDataParallel``, and what becomes of their arguments."""
