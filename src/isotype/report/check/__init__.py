"""The report of a check as data, and the functions that write it as text, JSON, SARIF and HTML."""
