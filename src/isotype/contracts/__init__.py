"""Measured operator contracts per device: accepted operand dtypes, result dtypes, autocast lists."""
