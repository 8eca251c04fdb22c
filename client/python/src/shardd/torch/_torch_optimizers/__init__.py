"""torch's own optimizers on shards: their hooks, and where the job keeps their state."""
