"""What happens to a shard: replicas, patterns, inputs, measuring, writing. Knows nothing of Ray."""
