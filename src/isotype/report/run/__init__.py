"""The report of a training run as data, and the functions that write it as JSON and as HTML."""
