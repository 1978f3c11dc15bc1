"""Engines: the HTTP client of a server, and the owners that start it or attach to it."""
