"""C++ loops for CPU operations that torch lacks or splits into several: compiled if there is a compiler."""
