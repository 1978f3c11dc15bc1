"""The commands, one module each with a `run(args) -> int`; `hsx.cli` imports the one that is called."""
