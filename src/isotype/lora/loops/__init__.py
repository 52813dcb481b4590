"""C++ loops for operations that torch computes on a CPU by several operators, or not at all. They need a C++ compiler."""
