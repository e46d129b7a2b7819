"""Events: the fan-out that sends them to followers."""
