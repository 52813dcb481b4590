"""A training run as a report: the record, and its JSON, HTML, curves and model card."""
