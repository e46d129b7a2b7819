"""Benches of Hutch: each result is a ratio of two things measured in turn in one run. See README.md."""
