"""PLAN: the settings of a training that fit on a device, their speed, and the command of the best."""
