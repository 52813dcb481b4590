"""MEASURE: the values of a step: their largest magnitudes, and the first that is no number."""
