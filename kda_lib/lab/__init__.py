"""What the notebooks and reports use; `kda_lib` itself never imports it."""
