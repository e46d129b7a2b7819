"""The programs that benches start in processes of their own: see README.md."""
