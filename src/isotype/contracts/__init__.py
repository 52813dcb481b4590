"""KNOW: what each operator accepts, per device, measured; what autocast does to it."""
