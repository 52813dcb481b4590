"""The report of a training run: the record, and its JSON, HTML, curves and model card."""
