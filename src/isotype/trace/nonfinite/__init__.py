"""The search for the first operator of a step with a non-finite result: the step is run again."""
