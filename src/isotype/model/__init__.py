"""Live models: functions that read a model, apply a precision policy to it, and keep it under the policy."""
