"""What Hutch costs, as ratios between two things that run in turn in one run: see README.md."""
