"""The subcommands of `kernel-pytorch`, one module each. Other packages add theirs by entry point; see `cli.py`."""
