"""The report of a check: the record, and its text, JSON, SARIF and HTML forms."""
