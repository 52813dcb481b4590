"""Shared parts of rules: groups of broken contracts, weights, costs, words."""
