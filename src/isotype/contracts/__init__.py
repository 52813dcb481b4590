"""Measured contracts of operators on each device: accepted operand dtypes, result dtypes, autocast lists."""
