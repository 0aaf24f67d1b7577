"""Admin console: what every attention head holds, how the pool is used, and tuning of the engine."""
