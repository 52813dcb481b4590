"""C++ loops for CPU operations for which torch needs several operators or has none. They need a C++ compiler."""
