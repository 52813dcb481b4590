"""The first operator of a step whose result is not finite, found by running the step again."""
