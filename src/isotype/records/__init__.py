"""Frozen data that all parts of isotype share: step requests, traces, findings."""
