"""PLAN: which settings of a training fit on a device, how fast they are, and the command of the best."""
