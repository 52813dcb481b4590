"""A check as a report: the record, and its text, JSON, SARIF and HTML forms."""
