"""Traces real steps: a recorder beneath a running script, and the hooks that find the script's steps."""
