"""Loops in C++ for what torch has no operator for on a CPU, or several: compiled where there is a compiler, beside torch's operators."""
