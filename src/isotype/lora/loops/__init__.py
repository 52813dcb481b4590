"""C++ loops for CPU operations for which torch has no operator, or needs several. They need a C++ compiler."""
