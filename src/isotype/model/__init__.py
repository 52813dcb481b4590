"""Live models: applying a precision policy and keeping it."""
