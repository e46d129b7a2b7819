"""Events: the journal that stores them, and the fanout that sends them to followers."""
