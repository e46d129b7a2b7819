"""Load, kills, evidence, verdict: real processes are killed at any moment; every promise to a party is checked."""
