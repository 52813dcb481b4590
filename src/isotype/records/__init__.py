"""Frozen data for all parts of isotype: step requests, traces, findings."""
