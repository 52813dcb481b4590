"""Device profiles: native dtypes, memory and rates of a device; measurements of this machine."""
