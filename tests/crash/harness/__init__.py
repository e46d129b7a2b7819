"""The crash harness: it puts load on hutchd, kills processes at any moment, and checks each promise made to a party."""
