"""The kernels of the step loop in Triton, for CUDA; each has its plain reference in `engine/kernels/reference.py`."""
