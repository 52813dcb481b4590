"""Frozen data shared by all rooms: step requests, traces, findings."""
