"""Plans a training: finds the settings that fit on a device, and returns the best command and each setting's speed."""
