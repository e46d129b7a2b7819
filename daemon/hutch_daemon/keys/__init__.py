"""Providers' API keys: sealed at rest, given to the broker or to executors, never shown again."""
