"""fully_shard and FullyShardedDataParallel."""
