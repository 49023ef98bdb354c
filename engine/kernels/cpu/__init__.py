"""The native kernels of the CPU: C++ that is built for the machine it runs on, called without the GIL."""
