"""Generators of files that lie in the repository; nobody who uses isotype runs them."""
