"""Kernels for NVIDIA GPUs: CUDA C++ with raw pointers, compiled by nvcc on first use or ahead of it."""
