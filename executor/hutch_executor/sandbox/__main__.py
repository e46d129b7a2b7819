"""`python -m hutch_executor.sandbox`: probe the sandbox specified on standard input."""

from hutch_executor.sandbox.probe import main

if __name__ == "__main__":
    raise SystemExit(main())
