"""The durable record of hutchd: SQLite, one writer thread, numbered migrations."""
