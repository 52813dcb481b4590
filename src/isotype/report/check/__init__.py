"""The report of a check as data, and as text, JSON, SARIF and HTML."""
