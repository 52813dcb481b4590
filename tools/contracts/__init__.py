"""Measures the operand dtypes that operators accept on a device, for `src/isotype/contracts/tables`."""
