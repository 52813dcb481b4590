"""C++ loops for CPU operations for which torch has no operator or needs several; compiled if there is a compiler."""
