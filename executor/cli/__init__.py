"""The command line: a file per command, and what they share. Knows the executor only by its public face."""
