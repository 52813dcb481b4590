"""Commands: parse, call, render."""
