"""The proxy for model traffic: an agent authenticates with a lease; only the provider receives the real key."""
