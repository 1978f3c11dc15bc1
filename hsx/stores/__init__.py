"""The store: shards on the roots, the Zarr group over them, the token index and the ledger; written and read."""
