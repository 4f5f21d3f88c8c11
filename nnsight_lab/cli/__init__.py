"""The command line. Each subcommand is one module with ``add_parser``; see `nnsight_lab.cli.main`."""
