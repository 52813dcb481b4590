"""Access to private parts of other libraries, one file per library; docs/compat.md lists all of them with reasons."""
