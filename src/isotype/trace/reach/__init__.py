"""Which inputs reach which outputs, measured on a small copy."""
