"""Traces of real steps: the recorder under a running script, and the hooks that find its steps."""
