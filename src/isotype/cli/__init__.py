"""isotype's commands: they parse arguments, call the library, and print the result."""
