"""HOLD: what a live model holds, and how it is brought under a policy and kept there."""
