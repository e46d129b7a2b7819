"""What daemon, executor and client share: the words, the wire and the facts of a Unix host."""

__version__ = "0.1.0"
