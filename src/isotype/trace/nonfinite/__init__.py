"""The first operator of a step with a non-finite result, found by running the step again."""
