"""Device code, in CuTe DSL."""
