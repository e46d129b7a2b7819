"""What the benches start in processes of their own: see README.md."""
