"""CPU kernels: C++ headers without torch in them, a C binding, and the code that compiles, loads and calls
them."""
