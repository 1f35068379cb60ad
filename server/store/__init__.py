"""Persistent state: one SQLite database in the data directory, with a store per kind of object."""
