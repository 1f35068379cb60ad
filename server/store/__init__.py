"""What outlives a request: one SQLite database in the data directory, and who keeps what in it."""
