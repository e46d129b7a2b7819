"""Load, kills and a verdict: real processes are killed at any moment, and what each party was promised is checked."""
