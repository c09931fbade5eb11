"""One module per command of the command line: `options(parser)` and `run(args) -> Result`."""
