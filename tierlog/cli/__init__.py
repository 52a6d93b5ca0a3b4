"""The command line: one file a command group, loaded when it is called."""
