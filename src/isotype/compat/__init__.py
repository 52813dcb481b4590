"""Private parts of other libraries, one file per library: what is read or replaced, why, and tested versions."""
