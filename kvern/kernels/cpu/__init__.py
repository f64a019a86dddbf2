"""Native CPU kernels: C++ in this folder, chosen by instruction set at run time, and the Python that drives them."""
