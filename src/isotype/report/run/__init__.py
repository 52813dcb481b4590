"""The report of a training run: the record, and its JSON and HTML forms."""
