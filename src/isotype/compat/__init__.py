"""Access to private parts of other libraries, a file for each library. docs/compat.md lists them with reasons."""
