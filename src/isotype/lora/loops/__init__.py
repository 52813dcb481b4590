"""C++ loops for operations that torch computes on a CPU by several operators, or not at all. The loops need a C++ compiler."""
