"""Functions that read a model, apply a precision policy to the model, and restore the policy later."""
