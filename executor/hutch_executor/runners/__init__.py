"""What drives an agent: one module for each kind, behind the port in `port`."""
