"""Kernels that several tests look at, each compiled once a process."""

from functools import cache

from kda_lib.compile import compile_kernel

compiled = cache(compile_kernel)
