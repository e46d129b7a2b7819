"""`python -m hutch_executor.sandbox`: try a sandbox of the specification on standard input."""

from hutch_executor.sandbox.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
