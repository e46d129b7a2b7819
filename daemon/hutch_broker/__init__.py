"""The proxy for model traffic: agents show leases, and the provider alone gets the real key."""
