"""hutchd's durable data: an SQLite database with one writer thread and numbered migrations."""
