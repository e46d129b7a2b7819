"""hutchd's sockets: accepts connections, decides which calls are allowed, and passes them to the services."""
