"""C++ loops for CPU operations that take torch several operators or have none. They need a C++ compiler."""
