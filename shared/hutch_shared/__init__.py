"""Code that the daemon, the executor and the client share: the wire, its types, and facts about a Unix host."""

__version__ = "0.1.0"
